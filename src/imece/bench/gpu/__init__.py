"""One GPU: what imece costs there."""
