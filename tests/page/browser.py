#!/usr/bin/env python3
"""Tests the page of --page in headless Chromium, over WebDriver's HTTP interface.

    tests/page/browser.py target/debug/blockhaul [--screenshots DIR] [--axe FILE]

Needs chromium and chromedriver (Debian: chromium chromium-driver). Exit status 77: they are absent. With axe-core
(npm install --prefix target/npm-tools axe-core) each page is checked for what keeps people from using it; without
--axe it is taken from target/npm-tools, if it is there.
"""

import argparse
import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

LIMIT = 240
SIZE = 256 << 20


class Driver:
    """A WebDriver session."""

    def __init__(self, browser):
        self.process = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        port = None
        while port is None:
            line = self.process.stdout.readline()
            if not line:
                raise SystemExit("chromedriver ended before it listened")
            found = re.search(r"successfully on port (\d+)", line)
            port = found and int(found.group(1))
        # It must never wait for room in the pipe.
        threading.Thread(target=self.process.stdout.read, daemon=True).start()
        self.base = f"http://127.0.0.1:{port}/session"
        options = {
            "binary": browser,
            "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                     "--hide-scrollbars", "--force-device-scale-factor=1"],
        }
        wanted = {"browserName": "chrome", "goog:chromeOptions": options,
                  "goog:loggingPrefs": {"browser": "ALL"}}
        made = self.ask("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self.base += "/" + made["sessionId"]

    def ask(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data=data, method=method,
                                         headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=LIMIT) as reply:
                return json.load(reply)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode()[:600]}") from None

    def close(self):
        with contextlib.suppress(OSError, AssertionError):
            self.ask("DELETE", "")
        self.process.terminate()
        self.process.wait()

    def open(self, address):
        self.ask("POST", "/url", {"url": address})

    def run(self, script, *args):
        return self.ask("POST", "/execute/sync", {"script": script, "args": list(args)})

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def cdp(self, command, **parameters):
        return self.ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def size(self, width, height=900):
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height,
                 deviceScaleFactor=1, mobile=False)

    def scheme(self, name):
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.cdp("Emulation.setEmulatedMedia", features=features)

    def key(self, name):
        for kind in ("keyDown", "keyUp"):
            self.cdp("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def errors(self):
        logged = self.ask("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in logged if entry["level"] == "SEVERE"]

    def screenshot(self, path, last="footer"):
        """Keeps the page from its top to the end of an element."""
        if path:
            # Two frames: the page has drawn the latest figures.
            self.ask("POST", "/execute/async", {"args": [], "script": (
                "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")})
            made = self.cdp("Page.captureScreenshot", format="png", captureBeyondViewport=True,
                            clip={"x": 0, "y": 0, "scale": 1, **self.run(
                                "return {width: innerWidth, height: 12 + Math.ceil(document.querySelector("
                                "arguments[0]).getBoundingClientRect().bottom + scrollY)}", last)})
            with open(path, "wb") as file:
                file.write(base64.b64decode(made["data"]))


def until(what, check):
    """Waits until `check` returns something true, and returns it."""
    start = time.monotonic()
    while True:
        found = check()
        if found:
            return found
        if time.monotonic() - start > LIMIT:
            raise AssertionError(f"not within {LIMIT} s: {what}")
        time.sleep(0.05)


def figures(driver):
    """The exact column of the table, by key."""
    rows = driver.run(
        "return [...document.querySelectorAll('#figures-body tr')]"
        ".map(row => [row.dataset.key, row.children[2].textContent])")
    return dict(rows)


def compare(shown, snapshot):
    """Fails unless the table shows the numbers of the snapshot."""
    assert len(shown) >= 14, shown
    for key, value in shown.items():
        wanted = snapshot
        for part in key.split("."):
            wanted = wanted[part]
        # Microseconds are shown.
        assert float(value) == round(float(wanted), 6), f"{key}: {value} is shown for {wanted}"


class Program:
    """A blockhaul with a page. JSON lines of its standard output are kept."""

    def __init__(self, ours, folder, *args):
        self.process = subprocess.Popen([ours, *args], cwd=folder, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True)
        self.lines, self.said, self.address = [], [], None
        self.readers = [threading.Thread(target=self.read), threading.Thread(target=self.listen)]
        for reader in self.readers:
            reader.start()
        until("the address of the page", lambda: self.address or self.process.poll() is not None)
        assert self.address, self.said

    def read(self):
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def listen(self):
        for line in self.process.stderr:
            self.said.append(line)
            found = re.search(r"page on (http://\S+)", line)
            if found:
                self.address = found.group(1)

    def done(self):
        """Bytes done by the last line, which a busy machine may not have printed yet."""
        return self.lines[-1]["done"] if self.lines else 0

    def status(self):
        with urllib.request.urlopen(self.address + "status.json", timeout=LIMIT) as reply:
            return json.load(reply)

    def wait(self):
        status = self.process.wait(LIMIT)
        for reader in self.readers:
            reader.join()
        return status

    def end(self, number=signal.SIGKILL):
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.wait()


CONTRAST = """
const light = colour => {
  const [red, green, blue] = colour.match(/[\\d.]+/g).slice(0, 3).map(part => {
    const value = part / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
};
const behind = element => {
  const colour = getComputedStyle(element).backgroundColor;
  return /, 0\\)$/.test(colour) && element.parentElement ? behind(element.parentElement) : colour;
};
const faint = [];
for (const element of document.querySelectorAll('body *')) {
  const text = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
  if (!text || !element.offsetParent || element.tagName === 'SCRIPT') continue;
  const pair = [light(getComputedStyle(element).color), light(behind(element))].sort((a, b) => b - a);
  const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
  if (ratio < 4.5) faint.push(`${element.tagName} ${element.className} ${element.textContent}: ${ratio.toFixed(1)}`);
}
return faint;
"""


def check_contrast(driver):
    """All text has the contrast that WCAG asks for, 4.5."""
    faint = driver.run(CONTRAST)
    assert faint == [], faint


# The text of axe-core; None: it is not installed.
AXE = None
AXE_AT = "target/npm-tools/node_modules/axe-core/axe.min.js"
AXE_RUN = """
const done = arguments[arguments.length - 1];
const places = found => found.nodes.map(node => `${node.target}: ${node.failureSummary}`);
axe.run(document, {resultTypes: ['violations']}).then(
  result => done(result.violations.map(found => [found.id, found.help, ...places(found)])),
  error => done([String(error)]));
"""


def check_axe(driver):
    """axe-core finds nothing that keeps people from using the page."""
    if AXE is None:
        return
    if not driver.run("return typeof axe === 'object'"):
        driver.run(AXE)
    violations = driver.ask("POST", "/execute/async", {"script": AXE_RUN, "args": []})
    assert violations == [], json.dumps(violations, indent=1)


def check_width(driver, width):
    """The page fits; only tables scroll."""
    driver.size(width)
    until(f"a layout {width} wide", lambda: driver.run(
        "return innerWidth === arguments[0] && document.documentElement.scrollWidth <= innerWidth",
        width))


def test_copy(driver, ours, folder, shots):
    """Loads during a copy, shows its numbers, and survives its end."""
    # Slow enough for a line in the charts at 20 %.
    layer = f"rate?rate={'1500k' if shots else '8M'}"
    program = Program(ours, folder, "copy", "--metrics", "127.0.0.1:0", "--page", "--progress=json:1",
                      "--source-layer", layer, "--request-size", "64k", "--requests", "4",
                      "-C", "1", "--verify",
                      "sample:256M", "disk.raw")
    try:
        driver.size(1000)
        driver.scheme("light")
        driver.open(program.address)
        until("20 %", lambda: program.done() > SIZE * 0.2)
        low = program.lines[-1]["done"]
        until("an event after it", lambda: int(figures(driver)["done"]) >= low)
        shown = int(figures(driver)["done"])
        assert shown <= program.status()["done"] <= SIZE, "not more than there is"
        assert driver.text("#state") == "copying"
        assert int(driver.text("#percent").split()[0]) >= 20
        charts = driver.run("return document.querySelectorAll('.chart canvas').length")
        assert charts == (2 if shots else charts), charts
        drawn = driver.run(
            "const c = document.querySelector('#map');"
            "return [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data].some(x => x)")
        assert drawn, "the map is empty"
        driver.run("document.querySelector('#map').focus()")
        driver.key("ArrowRight")
        driver.key("ArrowRight")
        cell = driver.text("#map-cell")
        assert re.match(r"512 KiB to 1\.0 MiB: data", cell), cell
        driver.run("document.activeElement.blur()")
        check_contrast(driver)
        check_axe(driver)
        driver.screenshot(shots and os.path.join(shots, "copy-20.png"), "#charts-section")
        driver.scheme("dark")
        driver.screenshot(shots and os.path.join(shots, "copy-20-dark.png"))
        back = driver.run("return getComputedStyle(document.body).backgroundColor")
        assert back == "rgb(16, 19, 24)", back
        check_contrast(driver)
        check_axe(driver)
        check_width(driver, 360)
        driver.screenshot(shots and os.path.join(shots, "copy-20-phone.png"))
        driver.scheme("light")
        driver.size(1000)
        spoken = driver.run("const s = document.querySelector('#status');"
                            "return [s.getAttribute('aria-live'), s.textContent]")
        assert spoken[0] == "polite" and spoken[1].startswith("copying, "), spoken
        assert program.wait() == 0, program.said
        until("the end", lambda: "has ended" in driver.text("#notice"))
        assert "copied and verified" in driver.text("#notice"), driver.text("#notice")
        last = program.lines[-1]
        assert last["finished"] and last["success"], last
        compare(figures(driver), last)
        assert driver.text("#percent") == "100 %"
        assert driver.text("#state") == "complete"
        time.sleep(3)
        assert driver.text("#state") == "complete", "it does not look for the program again"
        driver.screenshot(shots and os.path.join(shots, "copy-end.png"), "#charts-section")
        assert driver.errors() == []
    finally:
        program.end()


def test_killed(driver, ours, folder, shots):
    """Says so if the program ends without a word."""
    program = Program(ours, folder, "copy", "--metrics", "127.0.0.1:0", "--page", "--rate", "1M",
                      f"pattern:{SIZE}", "null:")
    try:
        driver.open(program.address)
        until("a snapshot", lambda: driver.text("#state") == "copying")
        program.end()
        until("a notice", lambda: "No answer from the program since" in driver.text("#notice"))
        driver.errors()
    finally:
        program.end()


def test_failed(driver, ours, folder, shots):
    """Shows why a copy failed."""
    program = Program(ours, folder, "copy", "--metrics", "127.0.0.1:0", "--page", "--progress=json:1",
                      "--rate", "8M", "--request-size", "64k", "--retries", "0", "--source-layer",
                      "error?read=100%&at=40M", "pattern:64M", "null:")
    try:
        driver.open(program.address)
        until("the end", lambda: "has ended with exit status" in driver.text("#notice"))
        assert program.wait() != 0
        last = program.lines[-1]
        assert last["error"] in driver.text("#notice"), (last, driver.text("#notice"))
        assert driver.text("#state") == "failed"
        shown = driver.run("return [document.querySelector('#progress').className,"
                           " document.querySelector('#tiles').textContent]")
        assert shown[0] == "failed" and "Limited by" not in shown[1], shown
        check_contrast(driver)
        check_axe(driver)
        compare(figures(driver), last)
        assert driver.errors() == []
    finally:
        program.end()


def test_job(driver, ours, folder, shots):
    """Lists the disks of a job, each with its map."""
    job = os.path.join(folder, "vm.toml")
    with open(job, "w") as file:
        file.write("parallel = 2\nrate = \"24M\"\n")
        for name in ("root", "data", "home"):
            file.write(f"[[disk]]\nname = \"{name}\"\nsource = \"sample:96M\"\n"
                       f"target = \"{name}.raw\"\n")
    program = Program(ours, folder, "copy", "--metrics", "127.0.0.1:0", "--page", "--progress=json:1",
                      "--job", job)
    try:
        driver.size(1000)
        driver.open(program.address)
        until("rows", lambda: driver.run("return document.querySelectorAll('#disks tr').length") == 3)
        until("a disk under way", lambda: program.done() > 60 << 20)
        driver.screenshot(shots and os.path.join(shots, "job.png"), "#charts-section")
        check_axe(driver)
        check_width(driver, 360)
        driver.size(1000)
        assert program.wait() == 0, program.said
        until("the end", lambda: "has ended" in driver.text("#notice"))
        states = driver.run("return [...document.querySelectorAll('#disks tr')]"
                            ".map(row => [row.dataset.key, row.children[1].textContent, row.children[3].textContent])")
        assert states == [[name, "complete", "100 %"] for name in ("root", "data", "home")], states
        compare(figures(driver), program.lines[-1])
        assert driver.errors() == []
    finally:
        program.end()


def test_serve(driver, ours, folder, shots):
    """Lists the clients of a server, and says when it has ended."""
    socket = os.path.join(folder, "s")
    program = Program(ours, folder, "serve", "--metrics", "127.0.0.1:0", "--page", "-U", socket,
                      "--export", "root=sample:4G",
                      "--export", "data=memory:1G")
    clients = []
    try:
        until("the socket", lambda: os.path.exists(socket))
        uri = f"nbd+unix:///{{}}?socket={socket}"
        for ends in ([uri.format("root"), "null:"], [uri.format("root"), "null:"],
                     ["pattern:1G", uri.format("data")]):
            clients.append(subprocess.Popen([ours, "copy", "-C", "1", "--rate", "10M", *ends],
                                            stderr=subprocess.DEVNULL))
        driver.size(1000)
        driver.open(program.address)
        until("rows", lambda: driver.run("return document.querySelectorAll('#clients tr').length") >= 3)
        time.sleep(12 if shots else 2)
        status = program.status()
        shown = driver.run("return [...document.querySelectorAll('#clients tr')].map(row => row.dataset.key)")
        assert shown == [str(client["number"]) for client in status["clients"]], (shown, status)
        assert driver.run("return document.querySelectorAll('#exports tr').length") == 2
        assert int(figures(driver)["bytes.read"]) > 0
        check_axe(driver)
        driver.screenshot(shots and os.path.join(shots, "serve.png"), "#exports-section")
        check_width(driver, 360)
        driver.screenshot(shots and os.path.join(shots, "serve-phone.png"))
        driver.size(1000)
        program.process.send_signal(signal.SIGTERM)
        until("the end", lambda: "The server has ended" in driver.text("#notice"))
        assert driver.text("#state") == "ended"
        assert driver.errors() == []
    finally:
        for client in clients:
            client.kill()
            client.wait()
        program.end()


def test_jobs(driver, ours, folder, shots):
    """Shows the jobs of a server above its clients, with bar, rate, end and error, also on a phone."""
    socket, control = os.path.join(folder, "s"), os.path.join(folder, "c")
    program = Program(ours, folder, "serve", "--metrics", "127.0.0.1:0", "--page", "-U", socket,
                      "--control", control, "--layer", "delay?read=1ms",
                      "--export", "root=memory:256M", "--export", "data=memory:64M")
    clients = []
    try:
        until("the sockets", lambda: os.path.exists(socket) and os.path.exists(control))
        uri = f"nbd+unix:///{{}}?socket={socket}"
        for name, size in (("root", "256M"), ("data", "64M")):
            subprocess.run([ours, "copy", f"sample:{size}", uri.format(name)], check=True)
        ctl = [ours, "ctl", control]
        slow = ["--rate", "4M", "--request-size", "64k"]
        subprocess.run([*ctl, "backup", "root", "root.raw", *slow], check=True)
        subprocess.run([*ctl, "backup", "data", "nbd+unix:///?socket=/nosuch", "--wait"], check=False,
                       stderr=subprocess.DEVNULL)
        subprocess.run([*ctl, "mirror", "data", "data.raw", *slow], check=True)
        clients.append(subprocess.Popen([ours, "copy", "-C", "1", "--rate", "2M", uri.format("root"), "null:"],
                                        stderr=subprocess.DEVNULL))
        driver.size(1280)
        driver.scheme("light")
        driver.open(program.address)
        until("three jobs", lambda: driver.run("return document.querySelectorAll('#jobs tr').length") == 3)
        until("rates", lambda: "MiB/s" in driver.text("#jobs tr:last-child td:nth-child(5)"))
        rows = driver.run("return [...document.querySelectorAll('#jobs tr')].map(row => "
                          "[row.cells[0].textContent, row.cells[1].textContent, row.cells[2].firstChild.value,"
                          " row.cells[2].firstChild.className, row.cells[5].textContent])")
        mirror, failed, backup = rows
        assert mirror[0].startswith("3: mirror of data → ") and mirror[1] == "running", rows
        assert failed[1] == "failed (3)" and "cannot open the target" in failed[0], rows
        assert failed[3] == "failed" and ", ended " in failed[4], rows
        assert backup[1] == "running" and 0 < backup[2] < 1 and ", ends " in backup[4], rows
        above = driver.run("return document.querySelector('#jobs-section').compareDocumentPosition("
                           "document.querySelector('#clients-section')) & 4")
        assert above == 4, "jobs come before clients"
        exports = driver.run("return [...document.querySelectorAll('#exports tr')].map(row => row.textContent)")
        assert "behind delay" in exports[0] and "read-write, without TLS" in exports[0], exports
        assert not driver.run("return document.querySelector('details').open"), "figures are folded"
        for scheme in ("light", "dark"):
            driver.scheme(scheme)
            for width in (1280, 390):
                check_width(driver, width)
                check_contrast(driver)
                check_axe(driver)
                broken = driver.run(
                    "return [...document.querySelectorAll('#jobs td:nth-child(2)')].filter(cell => {"
                    "const range = document.createRange(); range.selectNodeContents(cell);"
                    "return range.getClientRects().length > 1; }).map(cell => cell.textContent)")
                assert broken == [], broken
                driver.screenshot(shots and os.path.join(shots, f"jobs-{scheme}-{width}.png"))
        driver.scheme("light")
        driver.size(1000)
        assert driver.errors() == []
    finally:
        for client in clients:
            client.kill()
            client.wait()
        program.end()


TESTS = [test_copy, test_killed, test_failed, test_job, test_serve, test_jobs]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("blockhaul")
    parser.add_argument("--screenshots", metavar="DIR")
    parser.add_argument("--axe", metavar="FILE", help="axe.min.js of axe-core")
    parser.add_argument("--only", metavar="NAME", help="run one test, for example copy")
    args = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if not browser or not shutil.which("chromedriver"):
        print("chromium or chromedriver is not installed")
        return 77
    axe = args.axe or (AXE_AT if os.path.exists(AXE_AT) else None)
    if axe:
        global AXE
        with open(axe, encoding="utf-8") as file:
            AXE = file.read()
    else:
        print("axe-core is not installed: pages are not checked with it")
    ours = os.path.abspath(args.blockhaul)
    driver = Driver(browser)
    try:
        for test in TESTS:
            name = test.__name__.removeprefix("test_")
            if args.only not in (None, name):
                continue
            with tempfile.TemporaryDirectory() as folder:
                test(driver, ours, folder, args.screenshots)
            print(f"{name}: {test.__doc__}", flush=True)
    finally:
        driver.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
