//! `cargo xtask pages`: makes the pages of results, which are not in the repository, and checks
//! them in a real browser, narrow and wide, light and dark. A page is put into frames of another
//! page, whose script measures it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{TaskResult, run};

/// Names of Chromium; the first one found is used.
const BROWSERS: &[&str] =
    &["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"];
/// Widths to check, in pixels: a phone, a screen.
const WIDTHS: [u32; 2] = [360, 1280];
/// Schemes, and Blink's numbers for them.
const SCHEMES: [(&str, u32); 2] = [("dark", 0), ("light", 1)];

/// Counts errors in the frames, and writes the result into the page. Contrast is that of WCAG: 4.5
/// for text. Bars and lines are graphics and need 3.
const SCRIPT: &str = r#"
const light = c => {
  const f = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const [r, g, b] = c.match(/[\d.]+/g).map(Number);
  return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b);
};
const contrast = (a, b) => {
  const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
  return (x + 0.05) / (y + 0.05);
};
addEventListener('load', () => {
  const wrong = [];
  for (const frame of document.querySelectorAll('iframe')) {
    const page = frame.contentDocument, view = frame.contentWindow, width = frame.width;
    page.querySelectorAll('details').forEach(d => d.open = true);
    const root = page.documentElement;
    if (root.scrollWidth > view.innerWidth) {
      const wide = [...page.querySelectorAll('main *')].find(e =>
        !e.closest('.wide') && e.getBoundingClientRect().right > view.innerWidth + 1);
      wrong.push(`${width}: ${root.scrollWidth} pixels wide, ${wide ? wide.outerHTML.slice(0, 80) : ''}`);
    }
    const back = view.getComputedStyle(page.body).backgroundColor;
    const seen = new Set();
    for (const e of page.querySelectorAll('h1, p, td, th, .value, .none, .bad, small, pre')) {
      const color = view.getComputedStyle(e).color;
      if (seen.has(color)) continue;
      seen.add(color);
      if (contrast(color, back) < 4.5) wrong.push(`${width}: ${e.tagName} ${color} on ${back}`);
    }
    for (const e of page.querySelectorAll('rect')) {
      const color = view.getComputedStyle(e).fill;
      if (seen.has(color)) continue;
      seen.add(color);
      if (contrast(color, back) < 3) wrong.push(`${width}: bar ${color} on ${back}`);
    }
    if (!page.querySelector('svg')) wrong.push(`${width}: no chart`);
    document.getElementById('back').textContent += back + ' ';
  }
  document.getElementById('result').textContent = 'wrong=' + wrong.length + '; ' + wrong.join('; ');
});
"#;

pub const HELP: &str = "\
cargo xtask pages [DIR…] [--check] [--shots DIR]

Writes index.html (charts; opens without a server) beside each result.json below DIR… [default:
bench/results].

  --check      opens the pages in headless Chromium, 360 and 1280 pixels wide, light and dark, and
               fails where something is wider than the window or hard to read. Left out, with the
               reason, where there is no Chromium
  --shots DIR  does the same, and keeps pictures of the pages in DIR
";

pub fn main(args: &[String]) -> TaskResult {
    let mut dirs = Vec::new();
    let mut check = false;
    let mut shots = None;
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--check" => check = true,
            "--shots" => shots = Some(PathBuf::from(args.next().ok_or("--shots needs a folder")?)),
            _ if arg.starts_with('-') => return Err(format!("unknown argument '{arg}'")),
            _ => dirs.push(PathBuf::from(arg)),
        }
    }
    if dirs.is_empty() {
        dirs.push(run::workspace().join("bench/results"));
    }
    let mut results = Vec::new();
    dirs.iter().try_for_each(|dir| find(dir, &mut results))?;
    if results.is_empty() {
        return Err("there is no result.json".into());
    }
    run::show(run::build(&["blockhaul-bench"], false).arg("--quiet"))?;
    let mut pages = Vec::new();
    for result in &results {
        let render = ["render"];
        run::show(
            Command::new(run::target().join("debug/blockhaul-bench")).args(render).arg(result),
        )?;
        pages.push(result.join("index.html"));
    }
    if check || shots.is_some() { check_all(&pages, shots.as_deref()) } else { Ok(()) }
}

/// Opens the pages in a browser.
fn check_all(pages: &[PathBuf], shots: Option<&Path>) -> TaskResult {
    let Some(browser) = BROWSERS.iter().find(|name| run::have(name)) else {
        let why = format!("none of {} is there", BROWSERS.join(", "));
        println!("left out: {why}");
        return if run::ci() { Err(why) } else { Ok(()) };
    };
    let mut wrong = Vec::new();
    for page in pages {
        let name = label(page);
        let mut backs = Vec::new();
        for (scheme, number) in SCHEMES {
            let (back, found) = look(browser, page, number)?;
            backs.push(back);
            match found {
                None => println!("ok: {name}, {scheme}, {WIDTHS:?}"),
                Some(text) => wrong.push(format!("{name}, {scheme}: {text}")),
            }
            if let Some(dir) = shots {
                shoot(browser, page, dir, &name, scheme, number)?;
            }
        }
        if backs[0] == backs[1] {
            wrong.push(format!("{name}: light and dark look the same"));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n  ")) }
}

/// All directories with a result, this one and those below.
fn find(dir: &Path, results: &mut Vec<PathBuf>) -> TaskResult {
    let entries =
        fs::read_dir(dir).map_err(|error| format!("cannot read {}: {error}", dir.display()))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            find(&path, results)?;
        } else if path.file_name().is_some_and(|name| name == "result.json") {
            results.push(dir.to_path_buf());
        }
    }
    Ok(())
}

/// The last two directories of a page.
fn label(page: &Path) -> String {
    let mut parts: Vec<String> = page
        .ancestors()
        .skip(1)
        .take(2)
        .filter_map(|dir| Some(dir.file_name()?.display().to_string()))
        .collect();
    parts.reverse();
    parts.join("-")
}

fn chromium(browser: &str, scheme: u32) -> Command {
    let mut command = Command::new(browser);
    command.args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]);
    command.arg(format!("--blink-settings=preferredColorScheme={scheme}"));
    command
}

/// The background of a page in one scheme, and its errors.
fn look(browser: &str, page: &Path, scheme: u32) -> Result<(String, Option<String>), String> {
    let text = fs::read_to_string(page)
        .map_err(|error| format!("cannot read {}: {error}", page.display()))?;
    let inner = text.replace('&', "&amp;").replace('"', "&quot;");
    let frames: String = WIDTHS
        .iter()
        .map(|width| {
            format!("<iframe width=\"{width}\" height=\"800\" srcdoc=\"{inner}\"></iframe>\n")
        })
        .collect();
    let outer = format!(
        "<!DOCTYPE html><meta charset=\"utf-8\"><meta name=\"color-scheme\" content=\"light dark\">\
         <p id=\"back\"></p><p id=\"result\"></p>\n{frames}<script>{SCRIPT}</script>\n"
    );
    let file = std::env::temp_dir().join(format!("blockhaul-pages-{}.html", std::process::id()));
    fs::write(&file, outer).map_err(|error| format!("cannot write {}: {error}", file.display()))?;
    let mut command = chromium(browser, scheme);
    let dom = run::quiet(
        command
            .args(["--virtual-time-budget=10000", "--dump-dom"])
            .arg(format!("file://{}", file.display())),
    );
    fs::remove_file(&file).map_err(|error| format!("cannot remove {}: {error}", file.display()))?;
    let dom = dom?;
    let result = between(&dom, "id=\"result\">").ok_or("the browser did not run the check")?;
    let back = between(&dom, "id=\"back\">").unwrap_or_default();
    match result.split_once("; ") {
        Some(("wrong=0", _)) => Ok((back, None)),
        Some((_, what)) => Ok((back, Some(what.to_owned()))),
        None => Err(format!("the browser did not run the check: {result}")),
    }
}

/// The text after a mark, up to the next tag.
fn between(text: &str, mark: &str) -> Option<String> {
    let rest = text.split_once(mark)?.1;
    Some(rest.split('<').next().unwrap_or_default().to_owned())
}

fn shoot(
    browser: &str,
    page: &Path,
    dir: &Path,
    name: &str,
    scheme: &str,
    number: u32,
) -> TaskResult {
    fs::create_dir_all(dir).map_err(|error| format!("cannot make {}: {error}", dir.display()))?;
    let page =
        page.canonicalize().map_err(|error| format!("cannot find {}: {error}", page.display()))?;
    for width in WIDTHS {
        let file = dir.join(format!("{name}-{width}-{scheme}.png"));
        let mut command = chromium(browser, number);
        command.arg(format!("--window-size={width},2400"));
        command.arg(format!("--screenshot={}", file.display()));
        run::quiet(command.arg(format!("file://{}", page.display())))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_machine_and_scenario() {
        assert_eq!(label(Path::new("bench/results/2026-x/copy/index.html")), "2026-x-copy");
        assert_eq!(between("a id=\"x\">b c<p>", "id=\"x\">").as_deref(), Some("b c"));
        assert_eq!(between("a", "b"), None);
    }
}
