"""Look at pages of the built site in headless Chromium, in two widths and both themes of the site's toggle.

    python -m docs.site_browser FOLDER [--shots FOLDER] [--chromium PATH] [PAGE ...]

The system prefers the other theme than the toggle. Reports what is wider than the page, requests to the network, errors
of scripts, text of pictures with a contrast below 3, and a search from disk without an answer. The exit code is 1 if
there is any. Needs the extra ``[browser]`` and a Chromium, such as Debian's.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

PAGES = ("index", "quickstart", "concepts", "api/polydyn", "api/Program", "operators", "errors", "exploring",
         "notebooks/1_from_onnx_to_kernel", "notebooks/3_changing_a_schedule")  # fmt: skip
WIDTHS = (390, 1280)
SCHEMES = {"default": "dark", "slate": "light"}
"""Maps a theme of the site to what the system prefers meanwhile."""
CONTRAST = 3.0
QUERY = "kernel_count"
WIDER = """() => {
  const clipped = e => {
    for (; e && e !== document.body; e = e.parentElement)
      if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(e).overflowX)) return true;
    return false;
  };
  const width = document.documentElement.clientWidth;
  const wide = [...document.querySelectorAll('.md-content *')].filter(e => {
    const r = e.getBoundingClientRect();
    return r.width && r.right > width + 1 && !clipped(e);
  });
  const page = document.documentElement.scrollWidth;
  return [...(page > width ? [`the page is ${page} wide`] : []),
          ...wide.map(e => `${e.tagName} is wider than the page: ${e.textContent.trim().slice(0, 40)}`)];
}"""
FAINT = """limit => {
  const parts = c => { const m = c.match(/[\\d.]+/g).map(Number); return m.length > 3 ? m : [...m, 1]; };
  const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
  const linear = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = c => 0.2126 * linear(c[0]) + 0.7152 * linear(c[1]) + 0.0722 * linear(c[2]);
  const filled = e => {
    const s = getComputedStyle(e), c = s.fill === 'none' ? [0, 0, 0, 0] : parts(s.fill);
    c[3] *= s.fillOpacity * s.opacity;
    return c;
  };
  document.documentElement.style.scrollBehavior = 'auto';
  const out = [];
  for (const t of document.querySelectorAll('svg.pd text')) {
    if (!t.textContent.trim() || t.closest('details:not([open])')) continue;
    t.scrollIntoView({ block: 'center' });
    const r = t.getBoundingClientRect(), at = [r.left + r.width / 2, r.top + r.height / 2];
    let under = parts(getComputedStyle(document.body).backgroundColor);
    for (const e of document.elementsFromPoint(...at).reverse())
      if (t.ownerSVGElement.contains(e) && !['text', 'tspan', 'svg'].includes(e.tagName))
        under = over(filled(e), under);
    const a = light(over(filled(t), under)), b = light(under);
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < limit) out.push(`contrast ${contrast.toFixed(1)}: ${t.textContent.slice(0, 40)}`);
  }
  return out;
}"""


def main() -> int:
    """Print the faults and return 1 if there is any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("pages", nargs="*", default=PAGES)
    parser.add_argument("--shots", type=Path)
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    arguments = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=arguments.chromium, args=["--no-sandbox"])
        found = list(faults(browser, arguments.site.resolve(), arguments.pages, arguments.shots))
        browser.close()
    print("\n".join(found) or f"{len(arguments.pages)} pages, {len(WIDTHS)} widths, 2 themes: no faults")
    return int(bool(found))


def faults(browser: Browser, site: Path, names: list[str], shots: Path | None) -> Iterator[str]:
    """Yield a sentence for every fault. ``shots``: folder for screenshots."""
    for width in WIDTHS:
        for scheme, preferred in SCHEMES.items():
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=preferred)
            seen = _watched(page)
            for name in names:
                page.goto(f"file://{site}/{name}.html")
                page.evaluate("s => document.body.setAttribute('data-md-color-scheme', s)", scheme)
                page.wait_for_timeout(300)  # the change of colours is animated
                if shots:
                    shots.mkdir(parents=True, exist_ok=True)
                    page.screenshot(path=shots / f"{name.replace('/', '_')}_{width}_{scheme}.png")
                for fault in (*page.evaluate(WIDER), *page.evaluate(FAINT, CONTRAST), *seen):
                    yield f"{name}, {width} px, {scheme}: {fault}"
                seen.clear()
            page.close()
    yield from _unanswered(browser, site, names[0])


def _watched(page: Any) -> list[str]:
    """Return a list to which the page adds requests to the network and errors of scripts."""
    seen: list[str] = []
    local = ("file:", "data:", "blob:", "about:")
    page.on("request", lambda r: None if r.url.startswith(local) else seen.append(f"requests {r.url}"))
    page.on("console", lambda m: seen.append(m.text) if m.type == "error" else None)
    return seen


def _unanswered(browser: Browser, site: Path, name: str) -> Iterator[str]:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"file://{site}/{name}.html")
    page.wait_for_timeout(1000)
    page.keyboard.press("Control+k")
    page.wait_for_timeout(1000)
    page.keyboard.type(QUERY)
    try:
        page.get_by_text("result", exact=False).first.wait_for(timeout=10_000)
        page.locator(f"a[href*='Program.html']:has-text('{QUERY}')").first.wait_for(timeout=10_000)
    except Exception as e:  # of playwright: nothing came up
        yield f"the search from disk does not find {QUERY}: {str(e).splitlines()[0]}"
    page.close()


if __name__ == "__main__":
    sys.exit(main())
