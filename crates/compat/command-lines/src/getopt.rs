//! Command lines as parsed by getopt_long(3): options anywhere among the operands until `--`, long
//! ones abbreviated if unambiguous, values after `=` or as the next word.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

/// An option.
#[derive(Debug, Clone, Copy)]
pub struct OptionSyntax {
    /// Its long name, without dashes.
    pub long: &'static str,
    /// Its short name.
    pub short: Option<u8>,
    /// Whether it has a value.
    pub value: OptionArity,
    /// Its meaning; several options may have the same.
    pub means: &'static str,
}

/// Whether an option has a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptionArity {
    /// None.
    No,
    /// A required one.
    Must,
    /// An optional one, after `=`; the short form has none.
    May,
}

/// The options of a specification: words such as `image-opts`, `q|quiet` with a short name, `f|format=` with a
/// required value, `map=?` with an optional one, and `colour:color` with the meaning of another option.
pub fn table(specification: &'static str) -> Vec<OptionSyntax> {
    specification.split_whitespace().map(option).collect()
}

fn option(word: &'static str) -> OptionSyntax {
    let (name, value) = match (word.strip_suffix("=?"), word.strip_suffix('=')) {
        (Some(name), _) => (name, OptionArity::May),
        (None, Some(name)) => (name, OptionArity::Must),
        (None, None) => (word, OptionArity::No),
    };
    let (short, name) = name.split_once('|').unwrap_or(("", name));
    let (long, means) = name.split_once(':').unwrap_or((name, name));
    OptionSyntax { long, short: short.bytes().next(), value, means }
}

/// A parsed command line.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ParsedCommandLine {
    /// The meanings and values of the options, in order.
    pub options: Vec<(&'static str, Option<OsString>)>,
    /// Everything else, in order.
    pub operands: Vec<OsString>,
}

/// Parses a command line with the options of a specification ([`table`]).
///
/// # Errors
/// Names the invalid word.
pub fn parse(specification: &'static str, words: &[OsString]) -> Result<ParsedCommandLine, String> {
    let table = table(specification);
    let mut parts = ParsedCommandLine::default();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let bytes = word.as_bytes();
        if bytes == b"--" {
            parts.operands.extend(words.by_ref().cloned());
        } else if let Some(long) = bytes.strip_prefix(b"--") {
            let (name, value) = match long.iter().position(|&byte| byte == b'=') {
                Some(at) => (&long[..at], Some(OsString::from_vec(long[at + 1..].to_vec()))),
                None => (long, None),
            };
            let name = String::from_utf8_lossy(name);
            let opt = find(&table, &name)?;
            let value = match (opt.value, value) {
                (OptionArity::No, Some(_)) => {
                    return Err(format!("option --{} takes no value", opt.long));
                }
                (OptionArity::Must, None) => {
                    let missing = || format!("option --{} needs a value", opt.long);
                    Some(words.next().cloned().ok_or_else(missing)?)
                }
                (_, value) => value,
            };
            parts.options.push((opt.means, value));
        } else if bytes.len() > 1 && bytes[0] == b'-' {
            shorts(&table, &bytes[1..], &mut words, &mut parts)?;
        } else {
            parts.operands.push(word.clone());
        }
    }
    Ok(parts)
}

/// A word of short options; the first one with a value takes the rest of the word, or the next one.
fn shorts<'a>(
    table: &[OptionSyntax],
    letters: &[u8],
    words: &mut impl Iterator<Item = &'a OsString>,
    parts: &mut ParsedCommandLine,
) -> Result<(), String> {
    for (index, letter) in letters.iter().enumerate() {
        let shown = char::from(*letter).escape_default();
        let opt = table.iter().find(|opt| opt.short == Some(*letter));
        let opt = opt.ok_or_else(|| format!("unknown option -{shown}"))?;
        if opt.value != OptionArity::Must {
            parts.options.push((opt.means, None));
            continue;
        }
        let value = match &letters[index + 1..] {
            [] => words.next().cloned(),
            rest => Some(OsStr::from_bytes(rest).to_owned()),
        };
        let value = value.ok_or_else(|| format!("option -{shown} needs a value"))?;
        parts.options.push((opt.means, Some(value)));
        return Ok(());
    }
    Ok(())
}

/// The option of this name, or the only one with this prefix.
fn find<'a>(table: &'a [OptionSyntax], name: &str) -> Result<&'a OptionSyntax, String> {
    if let Some(opt) = table.iter().find(|opt| opt.long == name) {
        return Ok(opt);
    }
    let found: Vec<&OptionSyntax> = table.iter().filter(|opt| opt.long.starts_with(name)).collect();
    match found[..] {
        [] => Err(format!("unknown option --{name}")),
        [first, ref rest @ ..] if rest.iter().all(|opt| opt.means == first.means) => Ok(first),
        _ => {
            let names: Vec<String> = found.iter().map(|opt| format!("--{}", opt.long)).collect();
            Err(format!("option --{name} may be {}", names.join(" or ")))
        }
    }
}

/// The long options, one per line, for completion. Omits those that print these lists.
pub fn long_list(specification: &'static str) -> String {
    lines(table(specification).into_iter().filter(|opt| !HIDDEN.contains(&opt.long)))
}

/// All long options, one per line.
pub fn whole_long_list(specification: &'static str) -> String {
    lines(table(specification).into_iter())
}

fn lines(options: impl Iterator<Item = OptionSyntax>) -> String {
    options.map(|opt| format!("--{}\n", opt.long)).collect()
}

/// The short options, one per line.
pub fn short_list(specification: &'static str) -> String {
    let letters = table(specification).into_iter().filter_map(|opt| opt.short);
    letters.map(|letter| format!("-{}\n", char::from(letter))).collect()
}

/// Options that only completion uses.
const HIDDEN: &[&str] = &["long-options", "short-options"];

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "C|connections= color colour:color p|progress=? v|verbose long-options";

    fn parsed(text: &str) -> Result<ParsedCommandLine, String> {
        let words: Vec<OsString> = text.split(' ').map(OsString::from).collect();
        parse(TABLE, &words)
    }

    fn options(text: &str) -> Vec<(&'static str, Option<String>)> {
        let options = parsed(text).unwrap().options;
        options
            .into_iter()
            .map(|(name, value)| (name, value.map(|v| v.into_string().unwrap())))
            .collect()
    }

    #[test]
    fn options_stand_anywhere_and_may_be_shortened() {
        let parts = parsed("a --conn 4 b -v -- -v --x").unwrap();
        assert_eq!(parts.operands, ["a", "b", "-v", "--x"]);
        assert_eq!(parts.options, [("connections", Some("4".into())), ("verbose", None)]);
        assert_eq!(options("--col"), [("color", None)]);
        assert_eq!(options("--colour"), [("color", None)]);
    }

    #[test]
    fn values_come_behind_or_next() {
        let four = || Some("4".to_string());
        for text in ["-C4", "-C 4", "--connections=4", "--connections 4"] {
            assert_eq!(options(text), [("connections", four())], "{text}");
        }
        assert_eq!(options("-vC4"), [("verbose", None), ("connections", four())]);
        assert_eq!(options("--progress=3"), [("progress", Some("3".into()))]);
        // An optional value is only accepted after =.
        assert_eq!(options("-p 3"), [("progress", None)]);
        assert_eq!(options("--progress 3"), [("progress", None)]);
        assert_eq!(options("--connections="), [("connections", Some(String::new()))]);
        assert_eq!(parsed("-").unwrap().operands, ["-"]);
    }

    #[test]
    fn what_cannot_be_understood_is_named() {
        let cases = [
            ("--what", "--what"),
            ("-x", "-x"),
            ("-C", "-C"),
            ("--connections", "--connections"),
            ("--verbose=1", "--verbose"),
            ("--co", "--connections or --color"),
            ("--=", "may be"),
        ];
        for (text, part) in cases {
            let error = parsed(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
        assert!(parse(TABLE, &[OsString::from_vec(vec![b'-', 0xff])]).is_err());
    }

    #[test]
    fn lists_name_options_once() {
        assert_eq!(long_list(TABLE), "--connections\n--color\n--colour\n--progress\n--verbose\n");
        assert!(whole_long_list(TABLE).ends_with("--verbose\n--long-options\n"));
        assert_eq!(short_list(TABLE), "-C\n-p\n-v\n");
    }
}
