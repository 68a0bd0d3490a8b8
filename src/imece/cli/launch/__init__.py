"""Runs scripts on several ranks; `imece drill` kills some of them."""
