//! The pages in `docs/layers` match the layers' declarations. `BLOCKHAUL_WRITE_DOCS=1` writes them
//! anew.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use blockhaul_catalog::Registry;

#[test]
fn the_pages_are_in_step_with_the_layers() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/layers");
    let layers = crate::common::kinds();
    let gates = blockhaul_nbdkit_devices::gates::all();
    let all = Registry { layers, gates, ..Registry::default() }.layers_and_gates();
    let mut pages: BTreeMap<String, String> = all
        .iter()
        .map(|layer| (format!("{}.md", layer.name()), blockhaul_layers::manual::page(*layer)))
        .collect();
    pages.insert("README.md".into(), blockhaul_layers::manual::index(&all));
    for layer in &all {
        assert!(!layer.manual().is_empty(), "{} has no manual text", layer.name());
    }
    if std::env::var_os("BLOCKHAUL_WRITE_DOCS").is_some() {
        fs::create_dir_all(&folder).unwrap();
        for (name, text) in &pages {
            fs::write(folder.join(name), text).unwrap();
        }
    }
    let mut there: Vec<String> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    there.sort();
    assert_eq!(there, pages.keys().cloned().collect::<Vec<_>>(), "{}", folder.display());
    for (name, text) in pages {
        let found = fs::read_to_string(folder.join(&name)).unwrap();
        assert!(found == text, "docs/layers/{name} is out of step: BLOCKHAUL_WRITE_DOCS=1");
    }
}
