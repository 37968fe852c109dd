"""Open a page of `jumbo-vit evaluate --report` in headless Chromium, use it as a reader would, take a picture of it.

    python scripts/check_report.py report/index.html --png report.png

Needs Chromium and its driver (`chromium` and `chromium-driver` in Debian). The script fails on an error in the console,
a request to anything but the page itself, a missing section, a heading that does not sort its table, or a page that is
wider than a narrow or a wide window; `--dark` shows the page as for a dark desktop.
"""

import argparse
import base64
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars"
)
SECTIONS = ("score", "mistakes", "reliability", "classes", "pictures")
WIDTHS = (400, 800, 1200, 2000)  # CSS pixels


def open_browser(chromium: str, driver: str, profile: str) -> webdriver.Chrome:
    """A browser with an empty profile that keeps its console and its network's log."""
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in [*FLAGS.split(), f"--user-data-dir={profile}", "about:blank"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(executable_path=driver))


def command(browser: webdriver.Chrome, name: str, **arguments: Any) -> dict[str, Any]:
    """One command of the DevTools protocol."""
    answer: dict[str, Any] = browser.execute_cdp_cmd(name, arguments)
    return answer


def set_width(browser: webdriver.Chrome, width: int) -> None:
    command(
        browser, "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
    )


def faults_in_logs(browser: webdriver.Chrome, page: str) -> list[str]:
    """Messages of the console, and requests that leave the page."""
    found = [f"console: {entry['message']}" for entry in browser.get_log("browser")]  # type: ignore[no-untyped-call]
    for entry in browser.get_log("performance"):  # type: ignore[no-untyped-call]
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            url = message["params"]["request"]["url"]
            # The browser's own first page asks for things too.
            mine = message["params"]["documentURL"].partition("#")[0] == page
            if mine and url != page and not url.startswith("data:"):
                found.append(f"request: {url}")
    return found


def faults_in_sections(browser: webdriver.Chrome) -> list[str]:
    found = [f"no section {name}" for name in SECTIONS if not browser.find_elements(By.ID, name)]
    if not browser.find_elements(By.ID, "confusions") and "average precision" not in browser.page_source:
        found.append("neither a confusion matrix nor average precision")
    broken = browser.execute_script(
        "return [...document.images].filter(i => (i.loading = 'eager', i.complete && !i.naturalWidth)).length"
    )
    return [*found, f"{broken} pictures do not show"] if broken else found


def column(browser: webdriver.Chrome, number: int) -> list[str]:
    """A column of the sortable table: the name, or the number as stored."""
    script = """return [...document.querySelector("table.sortable").tBodies[0].rows].map(
        row => arguments[0] ? row.cells[arguments[0]].dataset.v : row.cells[0].textContent)"""
    cells: list[str] = browser.execute_script(script, number)
    return cells


def faults_in_sorting(browser: webdriver.Chrome) -> list[str]:
    """Click each heading of the class table twice; numbers must rise, then fall, with absent classes at the end."""
    found = []
    for number, head in enumerate(browser.find_elements(By.CSS_SELECTOR, "table.sortable thead th")):
        name, before = head.text, sorted(column(browser, number))
        for way in ("ascending", "descending"):
            browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", head)
            head.find_element(By.TAG_NAME, "button").click()
            cells = column(browser, number)
            if sorted(cells) != before or head.get_attribute("aria-sort") != way:
                found.append(f"sorting by {name} loses rows or is not marked as {way}")
            values = [float(cell) for cell in cells if cell] if number else []
            if values != sorted(values, reverse=way == "descending") or "" in cells[: len(values)]:
                found.append(f"sorting by {name} is not {way}: {cells[:5]}")
            if number == 0 and way == "ascending":
                rising = cells
            if number == 0 and way == "descending" and cells != rising[::-1]:
                found.append(f"sorting by {name} down is not up reversed")
    return found


def faults_in_widths(browser: webdriver.Chrome) -> list[str]:
    found = []
    for width in WIDTHS:
        set_width(browser, width)
        script = "return document.documentElement.scrollWidth"
        wide = browser.execute_script(script)
        if wide > width:
            found.append(f"the page is {wide} pixels wide in a window of {width}")
    return found


def shot(browser: webdriver.Chrome, path: Path, width: int, height: int | None) -> None:
    """A PNG of the page's top `height` pixels, or of all of it."""
    set_width(browser, width)
    whole = command(browser, "Page.getLayoutMetrics")["cssContentSize"]["height"]
    clip = {"x": 0, "y": 0, "width": width, "height": min(height or whole, whole), "scale": 1}
    answer = command(browser, "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
    path.write_bytes(base64.b64decode(answer["data"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    parser.add_argument("--driver", default=shutil.which("chromedriver"))
    parser.add_argument("--png", type=Path, help="where the picture goes")
    parser.add_argument("--width", type=int, default=1200, help="of the picture")
    parser.add_argument("--height", type=int, help="of the picture; default the whole page")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--pdf", type=Path, help="print the page into this file")
    args = parser.parse_args()
    page = args.page.absolute().as_uri()
    with tempfile.TemporaryDirectory() as profile:
        browser = open_browser(args.chromium, args.driver, profile)
        try:
            scheme = [{"name": "prefers-color-scheme", "value": "dark" if args.dark else "light"}]
            command(browser, "Emulation.setEmulatedMedia", features=scheme)
            set_width(browser, args.width)
            browser.get(page)
            faults = faults_in_sections(browser)
            if args.png:
                shot(browser, args.png, args.width, args.height)
            if args.pdf:
                args.pdf.write_bytes(base64.b64decode(command(browser, "Page.printToPDF")["data"]))
            faults += [*faults_in_widths(browser), *faults_in_sorting(browser), *faults_in_logs(browser, page)]
        finally:
            browser.quit()
    for fault in faults:
        print(f"FAULT {fault}")
    print(f"{args.page}: {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
