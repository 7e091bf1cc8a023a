//! The figures in the README and in docs/performance.md are those of the newest results.

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
fn links_within_the_document_lead_to_a_scenario() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let (_, text) = blockhaul_bench::docs::documents(root).unwrap().pop().unwrap();
    let links: Vec<&str> =
        text.split("](#").skip(1).map(|rest| rest.split_once(')').unwrap().0).collect();
    assert!(!links.is_empty());
    for link in links {
        assert!(text.contains(&format!("<a id=\"{link}\"></a>")), "nothing is at #{link}");
    }
}
