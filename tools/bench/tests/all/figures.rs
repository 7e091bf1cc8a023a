//! The figures in the README, in docs/performance.md and in the page of each scenario are those of the newest results.

use std::collections::BTreeSet;
use std::path::Path;

#[test]
fn figures_are_in_step_with_the_results() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    for (path, text) in blockhaul_bench::docs::documents(root).unwrap() {
        let found = std::fs::read_to_string(&path).unwrap();
        let name = path.file_name().unwrap().display();
        assert!(found == text, "{name} is not up to date: run `cargo xtask bench docs`");
    }
}

#[test]
fn each_scenario_has_a_page_that_the_table_of_contents_names() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let folder = root.join("docs/performance");
    let documents = blockhaul_bench::docs::documents(root).unwrap();
    let pages = documents.iter().map(|(path, _)| path).filter(|path| path.starts_with(&folder));
    let pages: BTreeSet<_> = pages.cloned().collect();
    let files = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    assert_eq!(files.collect::<BTreeSet<_>>(), pages);
    let contents = std::fs::read_to_string(root.join("docs/SUMMARY.md")).unwrap();
    for page in pages {
        let name = page.file_name().unwrap().to_str().unwrap();
        assert!(
            contents.contains(&format!("](performance/{name})")),
            "docs/SUMMARY.md lacks {name}"
        );
    }
}
