//! Import circles: files of a crate of which each uses the next one, and the last one the first. Two
//! files may use each other; more cannot be understood one at a time.
//!
//! A file uses another one where it names something of it: in `use`, or in a path that begins with `crate`,
//! `self`, `super` or a module that the file declares. `mod` alone is no use. A name that a module exports
//! again counts as a use of the file that has it, if that file is below the module, or if the module is the
//! root of the crate. The root is not counted otherwise. Methods are not followed, and tests are left out.
//!
//! - `lexer`: tokens of Rust. `imports`: what a file uses. `graph`: circles.

mod graph;
mod imports;
mod lexer;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use self::graph::circles;
pub use self::imports::production_tokens;
use self::imports::{Imports, ModuleTree};
pub use self::lexer::Token;
use crate::TaskResult;
use crate::rust_files::rust_files;

/// A circle: the folder of the crate, and its files below `src`.
type ModuleCircle = (String, Vec<String>);

/// Fails if there is an import circle of more than two files.
pub fn check(root: &Path) -> TaskResult {
    let faults = faults(&find(root)?);
    if faults.is_empty() {
        return Ok(());
    }
    Err(format!(
        "import circles of more than two files: move what they share into a file below them:\n{}",
        faults.concat()
    ))
}

/// The files that each file of a circle uses in it.
type Edges = BTreeMap<String, BTreeSet<String>>;

/// A text of whole lines for each circle.
fn faults(found: &[(ModuleCircle, Edges)]) -> Vec<String> {
    let text = |(circle, edges): &(ModuleCircle, Edges)| {
        let mut text = format!("  {}: {} files\n", circle.0, circle.1.len());
        for (file, used) in edges {
            let used: Vec<_> = used.iter().map(String::as_str).collect();
            text += &format!("    {file} uses {}\n", used.join(", "));
        }
        text
    };
    found.iter().map(text).collect()
}

/// The circles of more than two files, of all crates, with the uses in them.
fn find(root: &Path) -> Result<Vec<(ModuleCircle, Edges)>, String> {
    let mut files = Vec::new();
    for below in ["crates", "tools"] {
        if root.join(below).is_dir() {
            rust_files(root, Path::new(below), &mut files)?;
        }
    }
    files.sort();
    let mut crates: BTreeMap<PathBuf, Vec<PathBuf>> = BTreeMap::new();
    for file in files {
        if let Some((home, inner)) = placed(root, &file) {
            crates.entry(home).or_default().push(inner);
        }
    }
    let mut found = Vec::new();
    for (home, inner) in crates {
        let home_name = home.display().to_string();
        for (files, edges) in of_crate(&root.join(&home).join("src"), &inner)? {
            found.push(((home_name.clone(), files), edges));
        }
    }
    Ok(found)
}

/// The crate of a file of the program, and the file below its `src`; none for tests.
fn placed(root: &Path, file: &Path) -> Option<(PathBuf, PathBuf)> {
    let home = file.ancestors().skip(1).find(|dir| root.join(dir).join("Cargo.toml").is_file())?;
    let inner = file.strip_prefix(home.join("src")).ok()?;
    let is_test = inner.file_name()? == "tests.rs"
        || inner.components().any(|part| part.as_os_str() == "tests");
    (!is_test).then(|| (home.to_path_buf(), inner.to_path_buf()))
}

fn of_crate(src: &Path, files: &[PathBuf]) -> Result<Vec<(Vec<String>, Edges)>, String> {
    let mut modules = BTreeMap::new();
    let mut read = Vec::new();
    for file in files {
        let text = fs::read_to_string(src.join(file))
            .map_err(|error| format!("cannot read {}: {error}", src.join(file).display()))?;
        let module = module_of(file);
        // The library, if there are both.
        modules.entry(module.clone()).or_insert(read.len());
        read.push((module.clone(), Imports::of(&text, module)));
    }
    let all = ModuleTree { modules: &modules, files: &read };
    let uses: Vec<BTreeSet<usize>> = (0..read.len()).map(|file| all.used(file)).collect();
    let name = |file: usize| files[file].display().to_string();
    let circles = circles(&uses).into_iter().filter(|circle| circle.len() > 2);
    let named = circles.map(|circle| {
        let edges = circle.iter().map(|file| {
            let inside = uses[*file].iter().filter(|used| circle.contains(used));
            (name(*file), inside.map(|used| name(*used)).collect())
        });
        (circle.iter().map(|file| name(*file)).collect(), edges.collect())
    });
    Ok(named.collect())
}

/// The path of the module that a file below `src` is.
fn module_of(file: &Path) -> Vec<String> {
    let inner = file.with_extension("");
    let mut module: Vec<String> =
        inner.components().map(|part| part.as_os_str().to_string_lossy().into_owned()).collect();
    let is_root = module.len() == 1 && matches!(module[0].as_str(), "lib" | "main");
    if is_root || module.last().is_some_and(|last| last == "mod") {
        module.pop();
    }
    module
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The circles of a crate with these files, as names of files.
    fn circles_of(files: &[(&str, &str)]) -> Vec<Vec<String>> {
        found_in(files).into_iter().map(|((_, files), _)| files).collect()
    }

    fn found_in(files: &[(&str, &str)]) -> Vec<(ModuleCircle, Edges)> {
        let scratch = tempfile::tempdir().unwrap();
        let home = scratch.path().join("crates/one");
        for (file, text) in files {
            let path = home.join("src").join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        fs::write(home.join("Cargo.toml"), "").unwrap();
        find(scratch.path()).unwrap()
    }

    const MODS: &str = "mod a;\nmod b;\nmod c;\n";

    #[test]
    fn three_files_in_a_circle_are_found_with_what_they_use() {
        let files = [
            ("lib.rs", MODS),
            ("a.rs", "use crate::b::B;\nuse std::fmt;\npub struct A(B);\n"),
            ("b.rs", "pub struct B(super::c::C);\n"),
            ("c.rs", "pub(crate) use crate::{a::{self, A}, d};\npub struct C(Box<A>);\n"),
        ];
        let found = found_in(&files);
        assert_eq!(found.len(), 1);
        let (circle, edges) = &found[0];
        assert_eq!(circle.0, "crates/one");
        assert_eq!(circle.1, ["a.rs", "b.rs", "c.rs"]);
        assert_eq!(edges["c.rs"].iter().collect::<Vec<_>>(), ["a.rs"]);
        let text = faults(&found).concat();
        assert!(text.starts_with("  crates/one: 3 files\n    a.rs uses b.rs\n"), "{text}");
    }

    #[test]
    fn two_files_may_use_each_other() {
        let files = [
            ("lib.rs", MODS),
            ("a.rs", "use crate::b::B;\n"),
            ("b.rs", "use super::{a::A, c::C};\n"),
            ("c.rs", "use std::fmt;\n"),
        ];
        assert_eq!(circles_of(&files), [[""; 0]; 0]);
    }

    #[test]
    fn children_that_use_what_their_parent_has_make_a_circle() {
        let parent = "mod one;\nmod two;\nfn f() { one::g(); two::g() }\nconst SIZE: u64 = 1;\n";
        let mut files = [
            ("lib.rs", "mod x;\n"),
            ("x/mod.rs", parent),
            ("x/one.rs", "use super::SIZE;\npub fn g() {}\n"),
            ("x/two.rs", "pub fn g() { super::SIZE; }\n"),
        ];
        assert_eq!(circles_of(&files), [["x/mod.rs", "x/one.rs", "x/two.rs"]]);
        // A parent that only declares its children uses none.
        files[1].1 = "mod one;\nmod two;\nconst SIZE: u64 = 1;\n";
        assert_eq!(circles_of(&files), [[""; 0]; 0]);
    }

    #[test]
    fn what_is_exported_again_is_a_use_of_the_file_that_has_it() {
        let files = [
            ("lib.rs", "mod x;\nmod y;\npub use x::{Made as Thing};\n"),
            ("x/mod.rs", "mod one;\nmod two;\npub use self::one::{Made, Other};\nuse two::f;\n"),
            ("x/one.rs", "pub struct Made;\npub struct Other;\n"),
            ("x/two.rs", "use super::Made;\nuse crate::y::g;\npub fn f() {}\n"),
            ("y.rs", "use crate::x::Other;\nfn f(thing: &crate::Thing) {}\npub fn g() {}\n"),
        ];
        assert_eq!(circles_of(&files), [[""; 0]; 0]);
        // As a whole, the module is used.
        let mut whole = files;
        whole[4].1 = "use crate::x;\npub fn g() {}\n";
        assert_eq!(circles_of(&whole), [["x/mod.rs", "x/two.rs", "y.rs"]]);
    }

    #[test]
    fn comments_texts_visibility_and_tests_are_no_imports() {
        let text = "//! [`crate::b::B`]\n/* use crate::b::B; /* */ use crate::b; */\n\
                    pub(in crate::b) struct A<'a>(&'a str, char);\n\
                    const TEXT: &str = \"crate::b::B\\\"\"; const RAW: &str = r#\"\"crate::b::B\"#;\n\
                    const QUOTE: char = '\"';\n\
                    #[cfg(test)]\nuse crate::b::f;\n\
                    #[cfg(test)]\n#[allow(dead_code)]\npub(crate) mod tests {\n    use crate::b::f;\n    fn g() { {} }\n}\n";
        let mut files = [
            ("lib.rs", MODS),
            ("a.rs", text),
            ("b.rs", "use crate::c::C;\n"),
            ("c.rs", "use crate::a::A;\n"),
            ("a/tests.rs", "use crate::b::B;\n"),
        ];
        assert_eq!(circles_of(&files), [[""; 0]; 0]);
        let after = format!("{text}fn last() {{ crate::b::f() }}\n");
        files[1].1 = &after;
        assert_eq!(circles_of(&files), [["a.rs", "b.rs", "c.rs"]]);
    }

    #[test]
    fn super_in_a_module_within_a_file_is_the_file() {
        let files = [
            ("lib.rs", "mod x;\n"),
            ("x/mod.rs", "mod one;\nmod two;\nuse one::f;\nuse two::g;\npub const N: u8 = 1;\n"),
            (
                "x/one.rs",
                "const N: u8 = 1;\nmod inner { const M: u8 = super::N; }\nuse super::two::g;\n",
            ),
            ("x/two.rs", "use super::one::f;\nmod inner { const M: u8 = super::super::N; }\n"),
        ];
        assert_eq!(circles_of(&files), [["x/mod.rs", "x/one.rs", "x/two.rs"]]);
        let mut fewer = files;
        fewer[3].1 = "use super::one::f;\nmod inner { use super::f; }\n";
        assert_eq!(circles_of(&fewer), [[""; 0]; 0]);
    }

    #[test]
    fn the_workspace_has_no_circles() {
        assert_eq!(check(&crate::run::workspace()), Ok(()));
    }
}
