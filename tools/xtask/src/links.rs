//! Relative links of the documentation: the files and headings that they lead to.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::TaskResult;

/// Folders without documentation of ours.
const SKIPPED: &[&str] = &["target", "corpus"];

/// Parts of other pages, in which their links are checked.
const FRAGMENTS: &[&str] = &["bench/settings.md"];

/// What a page says of links: where it leads, and where others may lead.
#[derive(Default)]
struct PageLinks {
    /// Line numbers, from 1, and targets as they are written.
    links: Vec<(usize, String)>,
    anchors: BTreeSet<String>,
}

/// Links below `root` that lead nowhere, each as `FILE:LINE: what is wrong`. Links to other hosts are
/// not followed.
pub fn broken(root: &Path) -> Result<Vec<String>, String> {
    let mut pages = BTreeMap::new();
    for path in markdown_files(root)? {
        let text = fs::read_to_string(root.join(&path))
            .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        pages.insert(path, parse(&text));
    }
    let mut found = Vec::new();
    for (path, page) in &pages {
        for (line, target) in &page.links {
            if let Some(why) = wrong(root, path, target, &pages) {
                found.push(format!("{}:{line}: {why}", path.display()));
            }
        }
    }
    Ok(found)
}

/// Markdown files below a directory, relative to it, sorted.
pub fn markdown_files(root: &Path) -> Result<Vec<PathBuf>, String> {
    let mut found = Vec::new();
    collect(root, Path::new(""), &mut found)?;
    found.sort();
    Ok(found)
}

fn collect(root: &Path, below: &Path, found: &mut Vec<PathBuf>) -> TaskResult {
    let dir = root.join(below);
    let entries =
        fs::read_dir(&dir).map_err(|error| format!("cannot read {}: {error}", dir.display()))?;
    for entry in entries.flatten() {
        let name = entry.file_name();
        let path = below.join(entry.file_name());
        let name = name.to_string_lossy();
        let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if is_dir && !name.starts_with('.') && !SKIPPED.contains(&&*name) {
            collect(root, &path, found)?;
        } else if !is_dir
            && name.ends_with(".md")
            && !FRAGMENTS.iter().any(|part| path == Path::new(part))
        {
            found.push(path);
        }
    }
    Ok(())
}

/// What is wrong with a link on a page, if something is.
fn wrong(
    root: &Path,
    page: &Path,
    target: &str,
    pages: &BTreeMap<PathBuf, PageLinks>,
) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
    let place = match file {
        "" => page.to_path_buf(),
        _ => match normal(&page.parent()?.join(file)) {
            Some(place) => place,
            None => return Some(format!("{target} leads out of the repository")),
        },
    };
    if !root.join(&place).exists() {
        return Some(format!("{target}: there is no {}", place.display()));
    }
    let known = anchor.is_empty() || pages.get(&place)?.anchors.contains(anchor);
    (!known).then(|| format!("{target}: {} has no heading for #{anchor}", place.display()))
}

/// The files in the repository to which a page's links lead.
pub fn files(page: &Path, text: &str) -> Vec<PathBuf> {
    let dir = page.parent().unwrap_or(Path::new(""));
    let targets = parse(text).links.into_iter().map(|(_, target)| target);
    targets
        .filter(|target| !target.contains("://"))
        .filter_map(|target| normal(&dir.join(target.split('#').next()?)))
        .collect()
}

/// The path without `.` and `..`; None if it leads above the root.
pub fn normal(path: &Path) -> Option<PathBuf> {
    let mut found = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => found.push(name),
            Component::CurDir => {}
            Component::ParentDir if found.pop() => {}
            _ => return None,
        }
    }
    Some(found)
}

fn parse(text: &str) -> PageLinks {
    let mut page = PageLinks::default();
    let mut fenced = false;
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            page.links.extend(targets(line).into_iter().map(|target| (index + 1, target)));
            page.add_anchors(line);
        }
    }
    page
}

impl PageLinks {
    /// Adds the anchors that a line has: its heading's, made as GitHub and mdBook make it, and those
    /// of `id="…"`.
    fn add_anchors(&mut self, line: &str) {
        for rest in line.split("id=\"").skip(1) {
            self.anchors.insert(rest.split('"').next().unwrap_or_default().to_owned());
        }
        let Some(title) = heading(line) else { return };
        let base = slug(title);
        let mut name = base.clone();
        let mut count = 0;
        while !self.anchors.insert(name) {
            count += 1;
            name = format!("{base}-{count}");
        }
    }
}

/// The title in a line that is a heading.
pub fn heading(line: &str) -> Option<&str> {
    let rest = line.trim_start_matches('#');
    let level = line.len() - rest.len();
    ((1..=6).contains(&level) && rest.starts_with(' ')).then(|| rest.trim())
}

fn slug(title: &str) -> String {
    let mut plain = String::new();
    let mut rest = title;
    // Of a link, the text remains.
    while let Some((before, after)) = rest.split_once("](") {
        plain += before;
        rest = after.split_once(')').map_or("", |(_, after)| after);
    }
    plain += rest;
    let kept = plain.chars().filter_map(|c| match c {
        ' ' => Some('-'),
        _ if c.is_alphanumeric() || c == '-' || c == '_' => Some(c),
        _ => None,
    });
    kept.flat_map(char::to_lowercase).collect()
}

/// Targets of the links in a line: `[text](target)` and `[name]: target`.
fn targets(line: &str) -> Vec<String> {
    let line = without_code(line);
    let first = |text: &str| {
        let text = text.trim_start_matches('<');
        text.split([')', '>', ' ']).next().unwrap_or_default().to_owned()
    };
    let mut found: Vec<String> = line.split("](").skip(1).map(first).collect();
    if line.starts_with('[')
        && let Some((_, rest)) = line.split_once("]: ")
    {
        found.push(first(rest));
    }
    found
}

/// The line without what is between backticks.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join("`")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run;

    #[test]
    fn links_of_the_documentation_lead_somewhere() {
        let root = run::workspace();
        assert!(markdown_files(&root).unwrap().len() > 50);
        let found = broken(&root).unwrap();
        assert!(found.is_empty(), "{}", found.join("\n"));
    }

    #[test]
    fn broken_links_are_found() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path();
        fs::create_dir(root.join("docs")).unwrap();
        let page = "# A `b`: c, [d e](f.md)\n# Twice\n# Twice\n<a id=\"own\"></a>\n\
                    [1](#a-b-c-d-e) [2](#twice-1) [3](#own) [4](../README.md) [5](https://host/x)\n\
                    ```\n[6](gone.md)\n```\n`[7](gone.md)` [`8`](../gone)\n[9](../../x) [10](#twice-2)\n";
        fs::write(root.join("docs/page.md"), page).unwrap();
        fs::write(root.join("docs/f.md"), "[one]: page.md#twice\n[two]: page.md#thrice\n").unwrap();
        fs::write(root.join("README.md"), "").unwrap();
        let found = broken(root).unwrap();
        let expected = [
            "docs/f.md:2: page.md#thrice: docs/page.md has no heading for #thrice",
            "docs/page.md:9: ../gone: there is no gone",
            "docs/page.md:10: ../../x leads out of the repository",
            "docs/page.md:10: #twice-2: docs/page.md has no heading for #twice-2",
        ];
        assert_eq!(found, expected);
    }
}
