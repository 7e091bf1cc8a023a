//! Commands and steps of a scenario, as they are written.

use std::fmt;

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::vars::VariableValue;

/// A program and its arguments, or a line for the shell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepCommand {
    /// Words; a variable with a list expands to all the list's words.
    Words(Vec<String>),
    /// A line for `/bin/sh`.
    Shell(String),
}

/// Something that is done around the runs, outside the time that counts.
#[derive(Clone, Debug)]
pub enum ScenarioStep {
    /// Runs a command that must exit with status 0.
    Run(StepCommand),
    /// Makes an empty sparse file of this size; one that is there is removed.
    Fresh {
        /// The file.
        path: String,
        /// Its size in bytes.
        size: VariableValue,
    },
    /// Fills a file with wrong bytes (0xa5) wherever another one has data, and makes holes where it
    /// has holes. Blocks that the file has already are kept, so that a copy to it allocates none.
    Overwrite {
        /// The file.
        path: String,
        /// The other one.
        like: String,
    },
    /// Removes a file if it is there.
    Remove {
        /// The file.
        path: String,
    },
    /// Makes a file durable and asks the kernel to forget what it caches of it, so that it is read
    /// from the disk. Needs no root, unlike `drop_caches`, and does nothing to files in memory.
    Evict {
        /// The file.
        path: String,
    },
    /// Compares two files byte for byte.
    Compare {
        /// The file with the right bytes.
        expected: String,
        /// The file to be judged.
        found: String,
    },
}

impl<'de> Deserialize<'de> for StepCommand {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<StepCommand, D::Error> {
        struct CommandVisitor;
        impl<'de> Visitor<'de> for CommandVisitor {
            type Value = StepCommand;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of words, or a line for the shell")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> std::result::Result<StepCommand, E> {
                match text.trim() {
                    "" => Err(E::custom("the command is empty")),
                    line => Ok(StepCommand::Shell(line.to_owned())),
                }
            }
            fn visit_seq<A: SeqAccess<'de>>(
                self,
                mut words: A,
            ) -> std::result::Result<StepCommand, A::Error> {
                let mut all = Vec::new();
                while let Some(word) = words.next_element::<String>()? {
                    all.push(word);
                }
                if all.is_empty() {
                    Err(de::Error::custom("the command is empty"))
                } else {
                    Ok(StepCommand::Words(all))
                }
            }
        }
        from.deserialize_any(CommandVisitor)
    }
}

impl<'de> Deserialize<'de> for ScenarioStep {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<ScenarioStep, D::Error> {
        struct StepVisitor;
        impl<'de> Visitor<'de> for StepVisitor {
            type Value = ScenarioStep;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    "a step: a command (a list of words, or a line for the shell) or one of \
                     { fresh = FILE, size = SIZE }, { overwrite = FILE, like = FILE }, \
                     { remove = FILE }, { evict = FILE }, { compare = [EXPECTED, FOUND] }",
                )
            }
            fn visit_str<E: de::Error>(self, text: &str) -> std::result::Result<ScenarioStep, E> {
                let line = de::value::StrDeserializer::new(text);
                StepCommand::deserialize(line).map(ScenarioStep::Run)
            }
            fn visit_seq<A: SeqAccess<'de>>(
                self,
                words: A,
            ) -> std::result::Result<ScenarioStep, A::Error> {
                let words = de::value::SeqAccessDeserializer::new(words);
                StepCommand::deserialize(words).map(ScenarioStep::Run)
            }
            fn visit_map<A: MapAccess<'de>>(
                self,
                map: A,
            ) -> std::result::Result<ScenarioStep, A::Error> {
                #[derive(Deserialize)]
                #[serde(deny_unknown_fields)]
                struct StepFields {
                    fresh: Option<String>,
                    size: Option<VariableValue>,
                    overwrite: Option<String>,
                    like: Option<String>,
                    remove: Option<String>,
                    evict: Option<String>,
                    compare: Option<[String; 2]>,
                }
                let StepFields { fresh, size, overwrite, like, remove, evict, compare } =
                    StepFields::deserialize(MapAccessDeserializer::new(map))?;
                match (fresh, size, overwrite, like, remove, evict, compare) {
                    (Some(path), Some(size), None, None, None, None, None) => {
                        Ok(ScenarioStep::Fresh { path, size })
                    }
                    (None, None, Some(path), Some(like), None, None, None) => {
                        Ok(ScenarioStep::Overwrite { path, like })
                    }
                    (None, None, None, None, Some(path), None, None) => {
                        Ok(ScenarioStep::Remove { path })
                    }
                    (None, None, None, None, None, Some(path), None) => {
                        Ok(ScenarioStep::Evict { path })
                    }
                    (None, None, None, None, None, None, Some([expected, found])) => {
                        Ok(ScenarioStep::Compare { expected, found })
                    }
                    _ => Err(de::Error::custom(format!("expected {}", de_expecting(&self)))),
                }
            }
        }
        fn de_expecting<'de, V: Visitor<'de>>(visitor: &V) -> String {
            struct ExpectedText<'a, V>(&'a V);
            impl<'de, V: Visitor<'de>> fmt::Display for ExpectedText<'_, V> {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    self.0.expecting(f)
                }
            }
            ExpectedText(visitor).to_string()
        }
        from.deserialize_any(StepVisitor)
    }
}
