//! `[ CMD ARG… ]`: groups of words that are one device, taken out of the command line before it is
//! parsed, so that options of the command inside are not taken for ours.

use std::ffi::{OsStr, OsString};

use block::{Error, Kind, Result, Spec};

/// The groups of a command line, in order.
#[derive(Debug, Default)]
pub struct Groups(Vec<Vec<OsString>>);

impl Groups {
    /// The device behind a word of the command line that [`take`] returned.
    pub fn spec(&self, word: &OsStr) -> Result<Spec> {
        let Some(number) = word.to_str().and_then(|word| word.strip_prefix(MARK)) else {
            return Spec::parse(word);
        };
        let group = number.parse().ok().and_then(|number: usize| self.0.get(number));
        match group {
            Some(words) => Ok(Spec::Command(words.clone())),
            None => Err(Error::new(Kind::Usage, "a device name holds a NUL")),
        }
    }
}

/// Begins the word that stands for a group. No argument of a program can hold a NUL.
const MARK: &str = "\0group ";

/// Replaces each group, from a word that is exactly `[` to the matching `]`, by one word. An error
/// says what is unbalanced.
pub fn take(words: Vec<OsString>) -> Result<(Vec<OsString>, Groups), String> {
    let mut kept = Vec::new();
    let mut groups = Groups::default();
    let mut open: Option<Vec<OsString>> = None;
    let mut depth = 0_usize;
    for word in words {
        let (opens, closes) = (word == "[", word == "]");
        match &mut open {
            None if opens => {
                open = Some(Vec::new());
                depth = 1;
            }
            None if closes => return Err("] without [ before it".to_string()),
            None => kept.push(word),
            Some(group) => {
                depth = if opens { depth + 1 } else { depth - usize::from(closes) };
                if depth > 0 {
                    group.push(word);
                    continue;
                }
                if group.is_empty() {
                    return Err("no command between [ and ]".to_string());
                }
                kept.push(format!("{MARK}{}", groups.0.len()).into());
                groups.0.extend(open.take());
            }
        }
    }
    match open {
        None => Ok((kept, groups)),
        Some(_) => Err("[ without ]: end the command with a word that is only ]".to_string()),
    }
}

/// A message about the command line, with groups as people know them.
pub fn readable(text: &str) -> String {
    let mut parts = text.split(MARK);
    let mut readable = parts.next().unwrap_or_default().to_string();
    for part in parts {
        readable.push_str("[ … ]");
        readable.push_str(part.trim_start_matches(|c: char| c.is_ascii_digit()));
    }
    readable
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take_text(text: &str) -> Result<(Vec<OsString>, Groups), String> {
        take(text.split_whitespace().map(OsString::from).collect())
    }

    #[test]
    fn groups_nest_and_count_as_one_word() {
        let (words, groups) = take_text("copy [ a -x [ b ] c ] --flush [ d ]").unwrap();
        assert_eq!(words.len(), 4);
        assert_eq!(words[2], "--flush");
        let inner = ["a", "-x", "[", "b", "]", "c"].map(OsString::from).to_vec();
        assert_eq!(groups.spec(&words[1]).unwrap(), Spec::Command(inner));
        assert_eq!(groups.spec(&words[3]).unwrap(), Spec::Command(vec!["d".into()]));
        assert_eq!(groups.spec(OsStr::new("[d]")).unwrap(), Spec::Path("[d]".into()));
        assert_eq!(readable(&format!("'{MARK}12' is wrong")), "'[ … ]' is wrong");
    }

    #[test]
    fn unbalanced_groups_are_refused() {
        for bad in ["copy [ a", "copy a ]", "copy [ a [ b ] c", "copy [ ]", "["] {
            assert!(take_text(bad).is_err(), "{bad}");
        }
    }
}
