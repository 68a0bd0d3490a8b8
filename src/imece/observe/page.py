"""The frame of a report page: one file that fetches nothing and has no script, in light and dark."""

from __future__ import annotations

import html

# Even if a model's text came into the page as markup, a browser would run and fetch nothing of it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

_STYLE = """
:root { color-scheme: light dark;
  --back: #fbfbf9; --card: #ffffff; --text: #1d2430; --soft: #5d6675; --line: #dfe2e7; --code: #f3f4f1;
  --main: #1f6fb2; --raw: #a9cbe8; --val: #c2570c; --level: #8a93a3;
  --data: #d9a441; --forward: #9fc5e8; --backward: #3d78b4; --exposed: #cc4125; --optimizer: #57a99a;
  --copy: #c58fb0; --other: #b3b8c2; --beside: #8e7cc3; }
@media (prefers-color-scheme: dark) { :root {
  --back: #14171c; --card: #1c2027; --text: #e4e7ec; --soft: #9aa4b3; --line: #323943; --code: #12151a;
  --main: #6cb2ee; --raw: #2f5373; --val: #f0975a; --level: #778294;
  --data: #c9973c; --forward: #86b3dc; --backward: #3f73a8; --exposed: #d9573c; --optimizer: #4f9c8e;
  --copy: #ad7697; --other: #6d7684; --beside: #9a8bd0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 3rem; background: var(--back);
  color: var(--text); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
.under, .note, small { color: var(--soft); }
.under { margin: .2rem 0 1.2rem; }
.note { font-size: .85rem; margin: .5rem 0 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(7.5rem, 1fr)); gap: .75rem; }
.tiles div, figure, .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.tiles div { padding: .7rem .8rem; }
.tiles b { display: block; font-size: 1.4rem; white-space: nowrap; line-height: 1.2; font-weight: 650; }
.tiles span { display: block; margin-top: .2rem; font-size: .85rem; line-height: 1.3; color: var(--soft); }
.card { padding: .9rem 1rem; margin: .75rem 0; overflow-x: auto; }
.bars { display: grid; grid-template-columns: fit-content(45%) 1fr max-content; gap: .4rem .8rem;
  align-items: center; font-size: .92rem; }
.bars i { display: block; height: .8rem; border-radius: 3px; background: var(--level); min-width: 2px; }
.bars .own { font-weight: 650; } .bars i.own { background: var(--val); }
.bars .number { text-align: right; font-variant-numeric: tabular-nums; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: .75rem; }
figure { margin: .75rem 0; padding: .9rem 1rem; } .two figure { margin: 0; }
.picture div { overflow-x: auto; margin-top: .5rem; }
.picture img { display: block; width: 100%; min-width: 54rem; }
@media (prefers-color-scheme: dark) { .picture img { filter: invert(.89) hue-rotate(180deg); } }
figcaption { font-weight: 650; }
figcaption small { font-weight: 400; margin-left: .3rem; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: .2rem 0 0; font-size: .85rem; }
.legend i { display: inline-block; width: 1.1em; height: .28em; margin-right: .4em; vertical-align: .22em;
  border-radius: 2px; background: currentColor; }
.legend .area { height: .8em; vertical-align: -.05em; }
.legend .dot { width: .6em; height: .6em; border-radius: 50%; vertical-align: .05em; }
.plot { position: relative; height: 11rem; margin: .8rem .2rem 1.5rem 3rem; } .plot.tall { height: 20rem; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: hidden; display: block; }
.plot span { position: absolute; font-size: .75rem; line-height: 1; color: var(--soft); white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.plot i { position: absolute; left: 0; right: 0; border-top: 1px solid var(--line); }
.plot .y { right: 100%; margin-right: .45rem; transform: translateY(-50%); }
.plot .x { top: 100%; margin-top: .45rem; transform: translateX(-50%); }
.plot .name { right: 0; transform: translateY(-115%); padding: 0 .2rem;
  background: var(--card); }
svg * { vector-effect: non-scaling-stroke; }
polyline, path { fill: none; stroke: currentColor; stroke-linejoin: round; stroke-width: 1.8; }
polygon { fill: currentColor; }
.level { color: var(--level); stroke-width: 1.3; stroke-dasharray: 5 4; }
.raw { color: var(--raw); stroke-width: 1; } .main { color: var(--main); }
.dot { color: var(--val); }
.thread { color: var(--val); stroke-width: 1.3; }
.dot, .point { stroke-width: 8; stroke-linecap: round; }
.data { color: var(--data); } .forward { color: var(--forward); } .backward { color: var(--backward); }
.exposed { color: var(--exposed); } .optimizer { color: var(--optimizer); } .other { color: var(--other); }
.copy { color: var(--copy); } .beside { color: var(--beside); }
table { border-collapse: collapse; font-size: .92rem; } .wide { width: 100%; }
th { text-align: left; font-weight: 600; vertical-align: top; white-space: nowrap; }
td, th { padding: .25rem 1.2rem .25rem 0; border-bottom: 1px solid var(--line); }
td { overflow-wrap: break-word; vertical-align: top; }
tr:last-child > * { border-bottom: 0; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
table i { display: inline-block; width: .75em; height: .75em; border-radius: 2px; background: currentColor;
  margin-right: .5em; }
pre { margin: .75rem 0; padding: .8rem 1rem; background: var(--code); border: 1px solid var(--line);
  border-radius: 8px; white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 8;
  font: .84rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.commands pre { margin: .2rem 0 .8rem; }
summary { cursor: pointer; font-size: 1.1rem; font-weight: 650; margin: 2.2rem 0 .6rem; }
@media (max-width: 32rem) { body { padding: 1rem .7rem 2rem; } figure, .card { padding: .8rem .7rem; }
  .plot { margin-left: 2.5rem; } .plot.tall { height: 15rem; } .tiles { grid-template-columns: 1fr 1fr; }
  .tiles b { font-size: 1.25rem; } td, th { padding-right: .45rem; } }
"""


def page(title: str, body: str) -> str:
    """A whole HTML document. `body` is markup, `title` is plain text."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )
