//! `cargo xtask protocol`: where each requirement of the NBD protocol is implemented and tested.

mod page;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use crate::rust_files::rust_files;
use crate::{TaskResult, run};

pub const HELP: &str = "\
cargo xtask protocol [--write]

Checks that each requirement in specs/nbd.toml is cited in code and in a test, by a comment
`// nbd: ID, ID`, or has an exception with its reason; that comments cite known requirements only;
and that docs/protocol.md is up to date. `cargo xtask lint` does the same.

  --write   write docs/protocol.md
";

/// The requirements.
const SPEC: &str = "specs/nbd.toml";
/// The generated page.
const PAGE: &str = "docs/protocol.md";
/// What begins a citation, written so that this file does not contain one.
const CITES: &str = concat!("// nb", "d: ");
/// Longest sentence of a requirement, in bytes.
const SENTENCE: usize = 200;

/// One requirement of the protocol document.
#[derive(Debug, Default, PartialEq, Eq)]
struct Requirement {
    id: String,
    section: String,
    role: String,
    level: String,
    text: String,
    /// Why there is no code.
    exception: Option<String>,
}

/// Where a requirement is cited.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct CitationPlace {
    file: String,
    /// The function that begins there or has the line.
    function: String,
}

/// Citations of one requirement.
#[derive(Debug, Default)]
struct RequirementCitations {
    code: BTreeSet<CitationPlace>,
    tests: BTreeSet<CitationPlace>,
}

/// Citations by requirement.
type Citations = BTreeMap<String, RequirementCitations>;

pub fn main(args: &[String]) -> TaskResult {
    match args {
        [] => check(&run::workspace()),
        [write] if write == "--write" => write_page(&run::workspace()),
        _ => run::no_more(args),
    }
}

/// Checks requirements, citations and page.
pub fn check(root: &Path) -> TaskResult {
    let (requirements, citations) = both(root)?;
    let due = page::page(&requirements, &citations);
    if fs::read_to_string(root.join(PAGE)).unwrap_or_default() != due {
        return Err(format!("{PAGE} is out of date: run cargo xtask protocol --write"));
    }
    println!("protocol: {}", page::summary(&requirements));
    Ok(())
}

fn write_page(root: &Path) -> TaskResult {
    let (requirements, citations) = both(root)?;
    let text = page::page(&requirements, &citations);
    fs::write(root.join(PAGE), text).map_err(|error| format!("cannot write {PAGE}: {error}"))
}

/// Requirements and citations that agree.
fn both(root: &Path) -> Result<(Vec<Requirement>, Citations), String> {
    let text = fs::read_to_string(root.join(SPEC))
        .map_err(|error| format!("cannot read {SPEC}: {error}"))?;
    let requirements = parse(&text)?;
    let citations = citations(root)?;
    let faults = faults(&requirements, &citations);
    if faults.is_empty() {
        Ok((requirements, citations))
    } else {
        Err(format!("requirements of the protocol:\n  {}", faults.join("\n  ")))
    }
}

/// Reads the part of TOML that the list uses: tables `[[requirement]]` with strings on one line.
fn parse(text: &str) -> Result<Vec<Requirement>, String> {
    let mut found: Vec<Requirement> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if line == "[[requirement]]" {
            found.push(Requirement::default());
            continue;
        }
        let wrong = |why: &str| format!("{SPEC}:{}: {why}", index + 1);
        let (key, value) = line.split_once(" = ").ok_or_else(|| wrong("not KEY = \"VALUE\""))?;
        let value = value.strip_prefix('"').and_then(|value| value.strip_suffix('"'));
        let value = value.filter(|value| !value.contains(['"', '\\']));
        let value = value.ok_or_else(|| wrong("not a plain string"))?.to_owned();
        let last = found.last_mut().ok_or_else(|| wrong("before the first [[requirement]]"))?;
        match key {
            "id" => last.id = value,
            "section" => last.section = value,
            "role" => last.role = value,
            "level" => last.level = value,
            "text" => last.text = value,
            "exception" => last.exception = Some(value),
            _ => return Err(wrong("an unknown key")),
        }
    }
    Ok(found)
}

/// What is wrong, one line each.
fn faults(requirements: &[Requirement], citations: &Citations) -> Vec<String> {
    let mut faults = Vec::new();
    let mut known = BTreeSet::new();
    let nothing = RequirementCitations::default();
    for requirement in requirements {
        let id = &requirement.id;
        if !known.insert(id.as_str()) {
            faults.push(format!("{id}: twice in {SPEC}"));
        }
        faults.extend(requirement.fault().map(|why| format!("{id}: {why}")));
        let cited = citations.get(id).unwrap_or(&nothing);
        match (&requirement.exception, cited.code.is_empty(), cited.tests.is_empty()) {
            (Some(_), true, true) | (None, false, false) => {}
            (Some(_), ..) => faults.push(format!("{id}: an exception, and cited")),
            (None, true, _) => faults.push(format!("{id}: cited by no code ({CITES}{id})")),
            (None, false, true) => faults.push(format!("{id}: cited by no test ({CITES}{id})")),
        }
    }
    for (id, cited) in citations.iter().filter(|(id, _)| !known.contains(id.as_str())) {
        let places = cited.code.iter().chain(&cited.tests);
        let files: Vec<_> = places.map(|place| place.file.as_str()).collect();
        faults.push(format!("{id}: not in {SPEC}, but cited in {}", files.join(", ")));
    }
    faults
}

impl Requirement {
    /// What is wrong with its own fields.
    fn fault(&self) -> Option<&'static str> {
        let is_id = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || ".-".contains(c);
        if !self.id.contains('.') || !self.id.chars().all(is_id) {
            return Some("an id is AREA.RULE in lower case");
        }
        if !["client", "server", "both"].contains(&self.role.as_str()) {
            return Some("the role is client, server or both");
        }
        if !["MUST", "MUST NOT", "SHOULD", "SHOULD NOT"].contains(&self.level.as_str()) {
            return Some("the level is MUST, MUST NOT, SHOULD or SHOULD NOT");
        }
        if self.section.is_empty() || !self.text.ends_with('.') || self.text.len() > SENTENCE {
            return Some("it needs a section and one short sentence");
        }
        None
    }
}

/// All citations in the Rust files of the program.
fn citations(root: &Path) -> Result<Citations, String> {
    let mut files = Vec::new();
    for below in ["crates", "tools"] {
        rust_files(root, Path::new(below), &mut files)?;
    }
    let mut found = Citations::new();
    for file in files {
        let text = fs::read_to_string(root.join(&file))
            .map_err(|error| format!("cannot read {}: {error}", file.display()))?;
        cited_in(&file, &text, &mut found);
    }
    Ok(found)
}

/// Adds the citations of one file.
fn cited_in(file: &Path, text: &str, found: &mut Citations) {
    let lines: Vec<&str> = text.lines().collect();
    // Tests come last in a file.
    let tests_from = lines.iter().position(|line| *line == "#[cfg(test)]");
    for (index, line) in lines.iter().enumerate() {
        let Some(ids) = line.trim_start().strip_prefix(CITES) else { continue };
        let is_test = is_test_file(file) || tests_from.is_some_and(|from| index > from);
        for id in ids.split(',').map(str::trim) {
            let place = CitationPlace {
                file: file.display().to_string(),
                function: function_at(&lines, index).unwrap_or("").to_owned(),
            };
            let cited = found.entry(id.to_owned()).or_default();
            if is_test { &mut cited.tests } else { &mut cited.code }.insert(place);
        }
    }
}

/// Whether a file has tests only, or checks for tests.
fn is_test_file(file: &Path) -> bool {
    file.components().any(|part| part.as_os_str() == "tests")
        || file.file_name().is_some_and(|name| name == "tests.rs")
        || file.starts_with("tools/testkit")
        || file.starts_with("tools/simulator")
}

/// The function that begins below the comments at `index`, or else the one that has the line.
fn function_at<'a>(lines: &[&'a str], index: usize) -> Option<&'a str> {
    let prose = |line: &&&str| line.trim_start().starts_with("//") || line.trim().starts_with("#[");
    let below = lines[index..].iter().find(|line| !prose(line))?;
    let indent = |line: &str| line.len() - line.trim_start().len();
    function(below).or_else(|| {
        let above = lines[..index].iter().rev();
        let mut outer = above.filter(|line| indent(line) < indent(lines[index]));
        outer.find_map(|line| function(line))
    })
}

/// The name in `fn NAME`.
fn function(line: &str) -> Option<&str> {
    let code = line.trim_start();
    let (before, after) = code.split_once("fn ").filter(|_| !code.starts_with("//"))?;
    if !before.split_whitespace().all(|word| word.starts_with("pub") || is_qualifier(word)) {
        return None;
    }
    after.split(|c: char| !c.is_alphanumeric() && c != '_').next().filter(|name| !name.is_empty())
}

fn is_qualifier(word: &str) -> bool {
    ["const", "async", "extern", "\"C\"", "crate)", "super)"].contains(&word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requirement(id: &str, exception: Option<&str>) -> Requirement {
        Requirement {
            id: id.to_owned(),
            section: "One".to_owned(),
            role: "client".to_owned(),
            level: "MUST".to_owned(),
            text: "It works.".to_owned(),
            exception: exception.map(str::to_owned),
        }
    }

    fn cited(files: &[(&str, &str)]) -> Citations {
        let mut found = Citations::new();
        for (file, text) in files {
            cited_in(Path::new(file), &text.replace('@', CITES), &mut found);
        }
        found
    }

    #[test]
    fn the_list_is_read() {
        let text = "# A comment\n[[requirement]]\nid = \"a.b\"\nsection = \"One\"\n\n\
            role = \"client\"\nlevel = \"MUST\"\ntext = \"It works.\"\n";
        assert_eq!(parse(text).unwrap(), [requirement("a.b", None)]);
        assert!(parse("id = \"a\"").unwrap_err().contains("before the first"));
        assert!(parse("[[requirement]]\nid = a").unwrap_err().contains(":2:"));
        assert!(parse("[[requirement]]\nidea = \"a\"").unwrap_err().contains("unknown key"));
    }

    #[test]
    fn code_and_tests_are_told_apart_and_named() {
        let code = "impl X {\n    @a.b\n    pub(crate) async fn one(&self) {\n        let x = 1;\n        \
            @a.b, a.c\n        two();\n    }\n}\n#[cfg(test)]\nmod tests {\n    @a.b\n    #[test]\n    \
            fn three() {}\n}\n";
        let found = cited(&[
            ("crates/uses/x/src/lib.rs", code),
            ("crates/uses/x/tests/y.rs", "@a.c\n#[test]\nfn four() {}\n"),
        ]);
        let names = |places: &BTreeSet<CitationPlace>| -> Vec<String> {
            places.iter().map(|place| place.function.clone()).collect()
        };
        assert_eq!(names(&found["a.b"].code), ["one"]);
        assert_eq!(names(&found["a.b"].tests), ["three"]);
        assert_eq!(names(&found["a.c"].code), ["one"]);
        assert_eq!(names(&found["a.c"].tests), ["four"]);
    }

    #[test]
    fn each_fault_is_reported() {
        let requirements = [
            requirement("a.good", None),
            requirement("a.untested", None),
            requirement("a.nowhere", None),
            requirement("a.never", Some("It cannot.")),
            requirement("a.both", Some("It cannot.")),
            requirement("a.good", None),
            requirement("Bad", Some("It cannot.")),
        ];
        let citations = cited(&[
            ("crates/x/src/a.rs", "@a.good, a.untested, a.both\nfn f() {}\n"),
            ("crates/x/tests/a.rs", "@a.good, a.unknown\nfn f() {}\n"),
        ]);
        let faults = faults(&requirements, &citations).join("\n");
        for fault in [
            "a.untested: cited by no test",
            "a.nowhere: cited by no code",
            "a.both: an exception, and cited",
            "a.good: twice",
            "Bad: an id is",
            "a.unknown: not in",
        ] {
            assert!(faults.contains(fault), "{faults}");
        }
        assert_eq!(faults.lines().count(), 6, "{faults}");
    }

    #[test]
    fn the_page_has_each_requirement_once() {
        let requirements =
            [requirement("a.good", None), requirement("a.never", Some("It cannot."))];
        let citations = cited(&[
            ("crates/x/src/a.rs", "@a.good\nfn code() {}\n"),
            ("crates/x/tests/a.rs", "@a.good\nfn test() {}\n"),
        ]);
        let text = page::page(&requirements, &citations);
        for part in ["`a.good`", "`x/src/a.rs`: `code`", "`x/tests/a.rs`: `test`", "It cannot."] {
            assert_eq!(text.matches(part).count(), 1, "{part} in {text}");
        }
        assert!(text.contains("1 of 2 MUST"), "{text}");
    }

    #[test]
    fn the_tree_agrees_with_the_list() {
        check(&run::workspace()).unwrap();
    }
}
