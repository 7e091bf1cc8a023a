//! Lists of the crates in the programs, in CycloneDX.

use serde_json::{Value, json};

use super::build::Flavour;
use super::closure::{self, Crate};
use super::piece::{DistRun, PackageOutput, write};

pub fn make(dist: &DistRun) -> Result<PackageOutput, String> {
    let mut files = Vec::new();
    for (flavour, suffix) in [(Flavour::Shared, ""), (Flavour::Static, "-static")] {
        let list = bill(&closure::crates(flavour)?, dist.version);
        let text = serde_json::to_string_pretty(&list).map_err(|error| error.to_string())?;
        let file = dist.out.join(format!("blockhaul-{}{suffix}.cdx.json", dist.version));
        write(&file, text + "\n")?;
        files.push(file);
    }
    Ok(PackageOutput::Files(files))
}

/// The document. It has neither a date nor a random number, so that it can be made again.
fn bill(crates: &[Crate], version: &str) -> Value {
    let parts: Vec<Value> =
        crates.iter().filter(|found| found.name != closure::PROGRAM).map(component).collect();
    let edges: Vec<Value> = crates.iter().map(edge).collect();
    json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": reference(closure::PROGRAM, version),
                "name": "blockhaul",
                "version": version,
                "purl": reference(closure::PROGRAM, version),
                "licenses": [{"expression": "MIT OR Apache-2.0"}],
            }
        },
        "components": parts,
        "dependencies": edges,
    })
}

fn component(found: &Crate) -> Value {
    let mut part = json!({
        "type": "library",
        "bom-ref": reference(&found.name, &found.version),
        "name": found.name,
        "version": found.version,
        "purl": reference(&found.name, &found.version),
        "licenses": [{"expression": found.licence}],
    });
    if let Some(sum) = &found.checksum {
        part["hashes"] = json!([{"alg": "SHA-256", "content": sum}]);
    }
    part
}

fn edge(found: &Crate) -> Value {
    let uses: Vec<String> =
        found.uses.iter().map(|(name, version)| reference(name, version)).collect();
    json!({"ref": reference(&found.name, &found.version), "dependsOn": uses})
}

/// The package URL of a crate. A plus sign in a version is escaped.
fn reference(name: &str, version: &str) -> String {
    format!("pkg:cargo/{name}@{}", version.replace('+', "%2B"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_reference_leads_to_a_component() {
        let list = bill(&closure::crates(Flavour::Static).unwrap(), "1.2.3");
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let parts = list["components"].as_array().unwrap();
        let known: BTreeSet<String> = parts.iter().map(|part| text(&part["bom-ref"])).collect();
        assert_eq!(known.len(), parts.len());
        let mut edges = 0;
        for edge in list["dependencies"].as_array().unwrap() {
            for used in edge["dependsOn"].as_array().unwrap() {
                assert!(known.contains(&text(used)), "{used}");
                edges += 1;
            }
        }
        assert!(edges > parts.len(), "{edges}");
        for part in parts {
            let own = text(&part["name"]).starts_with("blockhaul-");
            assert_eq!(part["hashes"].is_array(), !own, "{part}");
            assert_ne!(part["licenses"][0]["expression"], "NOASSERTION", "{part}");
        }
    }
}
