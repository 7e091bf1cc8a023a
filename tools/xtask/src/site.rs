//! `cargo xtask site`: the documentation as a site, by mdBook.
//!
//! mdBook renders one directory, but the documentation's links lead through the whole repository. The
//! pages are copied to a directory in which they have the same places, so that links stay as they are.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::{TaskResult, links, run};

pub const HELP: &str = "\
cargo xtask site

Checks the links of the documentation, and builds a site of it in target/site/html with mdBook (cargo install
mdbook). Its contents are docs/SUMMARY.md, with the pages of all layers and of all benchmark results.
";

/// Folders whose pages are listed below the entry for their README or for the folder above.
const FOLDERS: [(&str, &str); 2] =
    [("docs/layers", "docs/layers/README.md"), ("bench/results", "bench/README.md")];

pub fn main(args: &[String]) -> TaskResult {
    run::no_more(args)?;
    let root = run::workspace();
    let found = links::broken(&root)?;
    if !found.is_empty() {
        return Err(format!("links lead nowhere:\n  {}", found.join("\n  ")));
    }
    if !run::have("mdbook") {
        let why = "mdbook, which makes the site, is not installed: cargo install mdbook";
        println!("left out: {why}");
        return if run::ci() { Err(why.into()) } else { Ok(()) };
    }
    let site = run::target().join("site");
    if site.exists() {
        fs::remove_dir_all(&site)
            .map_err(|error| format!("cannot empty {}: {error}", site.display()))?;
    }
    let source = site.join("src");
    lay_out(&root, &source)?;
    let mut mdbook = std::process::Command::new("mdbook");
    mdbook.env("MDBOOK_BOOK__SRC", &source).arg("build").arg(&root);
    run::show(mdbook.arg("--dest-dir").arg(site.join("html")))?;
    missing_pages(&site.join("html"))?;
    println!("site: {}", site.join("html/index.html").display());
    Ok(())
}

/// An error where a link of a built page leads to a file that is not there: mdBook may give a page
/// another name.
fn missing_pages(html: &Path) -> TaskResult {
    let mut missing = BTreeSet::new();
    let mut folders = vec![html.to_path_buf()];
    while let Some(dir) = folders.pop() {
        let entries = fs::read_dir(&dir)
            .map_err(|error| format!("cannot read {}: {error}", dir.display()))?;
        for path in entries.flatten().map(|entry| entry.path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|kind| kind == "html")
                && !path.ends_with("404.html")
            {
                let text = read(&dir, &path)?;
                let targets = hrefs(&text).filter(|target| !dir.join(target).exists());
                missing.extend(targets.map(|target| format!("{}: {target}", path.display())));
            }
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    let missing: Vec<_> = missing.into_iter().collect();
    Err(format!("links of the site lead nowhere:\n  {}", missing.join("\n  ")))
}

/// Files that a page's `<a href="…">` lead to.
fn hrefs(text: &str) -> impl Iterator<Item = &str> {
    let links = text.split("<a ").skip(1).filter_map(|rest| {
        let (tag, _) = rest.split_once('>')?;
        tag.split_once("href=\"")?.1.split(['"', '#']).next()
    });
    links.filter(|target| !target.is_empty() && !target.contains(':'))
}

/// Copies the pages of the contents, and the files that they link to.
fn lay_out(root: &Path, source: &Path) -> TaskResult {
    let summary = summary(root)?;
    let mut wanted: BTreeSet<PathBuf> = summary.pages.iter().cloned().collect();
    for page in &summary.pages {
        let text = read(root, page)?;
        wanted
            .extend(links::files(page, &text).into_iter().filter(|file| root.join(file).is_file()));
    }
    for file in wanted {
        let to = source.join(&file);
        let dir = to.parent().unwrap_or(source);
        fs::create_dir_all(dir)
            .and_then(|()| fs::copy(root.join(&file), &to))
            .map_err(|error| format!("cannot copy {}: {error}", file.display()))?;
    }
    fs::write(source.join("SUMMARY.md"), summary.text)
        .map_err(|error| format!("cannot write the site's contents: {error}"))
}

/// The contents of the site.
struct SiteSummary {
    text: String,
    /// Paths relative to the root of the repository.
    pages: Vec<PathBuf>,
}

/// The contents with paths from the root, and with the pages of folders.
fn summary(root: &Path) -> Result<SiteSummary, String> {
    let place = Path::new("docs/SUMMARY.md");
    let mut text = String::new();
    let mut pages = Vec::new();
    for line in read(root, place)?.lines() {
        let Some((title, target)) = entry(line) else {
            text += &format!("{line}\n");
            continue;
        };
        let page = links::normal(&Path::new("docs").join(target))
            .ok_or(format!("docs/SUMMARY.md: {target} leads out of the repository"))?;
        text += &format!("{title}({})\n", page.display());
        for (folder, _) in FOLDERS.iter().filter(|(_, above)| page == Path::new(above)) {
            for inner in links::markdown_files(&root.join(folder))? {
                let inner = Path::new(folder).join(inner);
                if inner != page {
                    text += &format!("  - [{}]({})\n", title_of(root, &inner)?, inner.display());
                    pages.push(inner);
                }
            }
        }
        pages.push(page);
    }
    Ok(SiteSummary { text, pages })
}

/// An entry of the contents: what is before the target's parenthesis, and the target.
fn entry(line: &str) -> Option<(&str, &str)> {
    let (before, rest) = line.split_once("](")?;
    Some((&line[..before.len() + 1], rest.strip_suffix(')')?))
}

/// The first heading of a page.
fn title_of(root: &Path, page: &Path) -> Result<String, String> {
    let text = read(root, page)?;
    let title = text.lines().find_map(links::heading);
    title.map(str::to_owned).ok_or(format!("{} has no heading", page.display()))
}

fn read(root: &Path, page: &Path) -> Result<String, String> {
    fs::read_to_string(root.join(page))
        .map_err(|error| format!("cannot read {}: {error}", page.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_without_a_file_are_found() {
        let scratch = tempfile::tempdir().unwrap();
        let page = "<a class=\"x\" href=\"b.html#c\">b</a> <a href=\"#d\"> <a href=\"https://host/\"> <a id=\"e\">";
        fs::write(scratch.path().join("a.html"), page).unwrap();
        let why = missing_pages(scratch.path()).unwrap_err();
        assert!(why.ends_with("a.html: b.html"), "{why}");
        fs::write(scratch.path().join("b.html"), "").unwrap();
        missing_pages(scratch.path()).unwrap();
    }

    #[test]
    fn the_contents_list_every_page_once() {
        let root = run::workspace();
        let summary = summary(&root).unwrap();
        let listed: BTreeSet<_> = summary.pages.iter().cloned().collect();
        assert_eq!(listed.len(), summary.pages.len(), "{:?}", summary.pages);
        for page in links::markdown_files(&root.join("docs")).unwrap() {
            let page = Path::new("docs").join(page);
            let is_contents = page.ends_with("SUMMARY.md");
            assert!(
                is_contents || listed.contains(&page),
                "docs/SUMMARY.md lacks {}",
                page.display()
            );
        }
        assert!(summary.text.contains("](docs/serve.md)\n"), "{}", summary.text);
        assert!(
            summary.text.contains("\n  - [Layer `rate`](docs/layers/rate.md)\n"),
            "{}",
            summary.text
        );
    }
}
