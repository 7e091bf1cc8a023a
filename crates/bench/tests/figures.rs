//! The figures in the README and in docs/performance.md are those of the newest results.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::path::Path;

#[test]
fn figures_are_in_step_with_the_results() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    for (path, text) in bench::docs::documents(root).unwrap() {
        let found = std::fs::read_to_string(&path).unwrap();
        let name = path.file_name().unwrap().display();
        assert!(found == text, "{name} is not up to date: run `cargo xtask bench docs`");
    }
}
