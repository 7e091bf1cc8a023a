//! Names of types: each says by itself what it is, so that a search for it finds one place.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use crate::TaskResult;
use crate::circles::{Token, production_tokens};
use crate::rust_files::rust_files;

/// Names that a crate may define more than once: like modules, with one `Header` each.
const TWICE_IN_A_CRATE: usize = 20;
/// Public names that several crates may define.
const PUBLIC_IN_CRATES: usize = 15;
/// Names that are participles, pronouns or adverbs.
const PARTICIPLES: usize = 10;
/// Percentage of definitions whose name is one word.
const ONE_WORD: usize = 55;

/// Nouns that end like participles.
const NOUNS: &[&str] = &[
    "Building",
    "Encoding",
    "Feed",
    "Greeting",
    "Mapping",
    "Padding",
    "Partitioning",
    "Ring",
    "Seed",
    "Setting",
    "String",
    "Timing",
    "Uring",
];

/// Participles without an ending of their own, pronouns and adverbs.
const OTHERS: &[&str] = &[
    "Again", "All", "Also", "Apart", "Away", "Before", "Begun", "Behind", "Below", "Beside",
    "Between", "Both", "Done", "Found", "Given", "Gone", "Held", "Here", "Inside", "Its", "Kept",
    "Known", "Later", "Left", "Lost", "Made", "Met", "None", "Now", "Once", "Only", "Other",
    "Outside", "Own", "Said", "Same", "Seen", "Sent", "Set", "Some", "Soon", "Still", "Such",
    "Taken", "That", "Them", "There", "These", "This", "Those", "Told", "Too", "What", "When",
    "Where", "Which", "Who", "Whole", "Within", "Without", "Written", "Yet",
];

/// A type that production code defines.
struct Definition {
    name: String,
    is_public: bool,
    /// The folder of its crate.
    folder: String,
}

/// Names with the places that have them.
type Places = BTreeMap<String, BTreeSet<String>>;

/// Prints the four counts, and fails if one is above its limit.
pub fn check(root: &Path) -> TaskResult {
    let all = definitions(root)?;
    let one_word = all.iter().filter(|one| is_one_word(&one.name)).count();
    let percentage = one_word * 100 / all.len().max(1);
    let lists = [
        ("defined twice within a crate", TWICE_IN_A_CRATE, twice(&all)),
        ("public in several crates", PUBLIC_IN_CRATES, public_in_crates(&all)),
        ("participles, pronouns or adverbs", PARTICIPLES, participles(&all)),
    ];
    let counts =
        lists.iter().map(|(text, limit, found)| format!("{} {text} (limit {limit})", found.len()));
    let counts = counts.collect::<Vec<_>>().join(", ");
    println!(
        "names of types: {} definitions, {percentage} % one word (limit {ONE_WORD} %), {counts}",
        all.len()
    );
    let mut faults = Vec::new();
    for (text, limit, found) in &lists {
        if found.len() > *limit {
            faults.extend(found.iter().map(|(name, places)| {
                let places: Vec<_> = places.iter().map(String::as_str).collect();
                format!("{name}: {text}: {}", places.join(", "))
            }));
        }
    }
    if percentage > ONE_WORD {
        faults.push(format!("{percentage} % of type names are one word"));
    }
    if faults.is_empty() {
        Ok(())
    } else {
        Err(format!("names of types:\n  {}", faults.join("\n  ")))
    }
}

fn definitions(root: &Path) -> Result<Vec<Definition>, String> {
    let mut files = Vec::new();
    for below in ["crates", "tools"] {
        rust_files(root, Path::new(below), &mut files)?;
    }
    let mut all = Vec::new();
    for file in files {
        let path = file.to_string_lossy();
        let Some((folder, inside)) = path.split_once("/src/") else { continue };
        if inside.split('/').any(|part| matches!(part, "tests" | "tests.rs")) {
            continue;
        }
        let text =
            fs::read_to_string(root.join(&file)).map_err(|error| format!("{path}: {error}"))?;
        let tokens = production_tokens(&text);
        all.extend(of_file(&tokens).map(|(name, is_public)| Definition {
            name,
            is_public,
            folder: folder.to_owned(),
        }));
    }
    Ok(all)
}

/// The types that a file defines, and whether they are public.
fn of_file(tokens: &[Token]) -> impl Iterator<Item = (String, bool)> {
    let words = ["struct", "enum", "trait", "union"];
    let named = move |at: usize| {
        let is_definition = words.iter().any(|word| tokens[at].is(word));
        match tokens.get(at + 1) {
            Some(Token::Name(name)) if is_definition && name.starts_with(char::is_uppercase) => {
                let is_public = at > 0 && tokens[at - 1].is("pub");
                Some((name.clone(), is_public))
            }
            _ => None,
        }
    };
    (0..tokens.len()).filter_map(named)
}

fn twice(all: &[Definition]) -> Places {
    let mut counts: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for one in all {
        *counts.entry((&one.name, &one.folder)).or_default() += 1;
    }
    let mut found = Places::new();
    for ((name, folder), _) in counts.into_iter().filter(|(_, count)| *count > 1) {
        // A name counts in each crate that repeats it.
        found.entry(format!("{name} in {folder}")).or_default().insert(folder.to_owned());
    }
    found
}

fn public_in_crates(all: &[Definition]) -> Places {
    let mut found = Places::new();
    for one in all.iter().filter(|one| one.is_public) {
        found.entry(one.name.clone()).or_default().insert(one.folder.clone());
    }
    found.retain(|_, folders| folders.len() > 1);
    found
}

fn participles(all: &[Definition]) -> Places {
    let mut found = Places::new();
    for one in all.iter().filter(|one| is_participle(&one.name)) {
        found.entry(one.name.clone()).or_default().insert(one.folder.clone());
    }
    found
}

fn is_one_word(name: &str) -> bool {
    name.chars().filter(|c| c.is_uppercase()).count() == 1
}

fn is_participle(name: &str) -> bool {
    let ends = name.ends_with("ed") || name.ends_with("ing");
    is_one_word(name) && (OTHERS.contains(&name) || (ends && !NOUNS.contains(&name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_of_production_code_are_found() {
        let text = "pub struct Lane { x: u8 }\npub(crate) enum Kept { Struct }\n\
                    #[cfg(test)]\nmod tests { struct Asked; }\nfn f<struct_: T>() {}\n";
        let found: Vec<_> = of_file(&production_tokens(text)).collect();
        assert_eq!(found, [("Lane".to_owned(), true), ("Kept".to_owned(), false)]);
    }

    #[test]
    fn words_are_told_from_participles() {
        assert!(is_participle("Kept") && is_participle("Shared") && is_participle("Running"));
        assert!(
            !is_participle("Mapping") && !is_participle("SharedDevice") && !is_participle("Lane")
        );
        assert!(is_one_word("Lane") && !is_one_word("LaneState"));
    }
}
