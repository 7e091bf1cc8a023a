//! `[ CMD ARG… ]`: groups of words that form one device, removed from the command line before it is
//! parsed, so that options of the command inside are not taken for ours.

use std::ffi::{OsStr, OsString};

use crate::DeviceSpec;
use blockhaul_block::{Error, Kind, Result};

/// The groups of a command line, in order.
#[derive(Debug, Default)]
pub struct Groups(Vec<Vec<OsString>>);

impl Groups {
    /// The device for a word of the command line that [`take`] returned.
    ///
    /// # Errors
    /// [`Kind::Usage`] if the word is empty, or holds a NUL.
    pub fn spec(&self, word: &OsStr) -> Result<DeviceSpec> {
        match self.words(word) {
            None => DeviceSpec::parse(word),
            Some(Some(words)) => Ok(DeviceSpec::Command(words.to_vec())),
            Some(None) => Err(Error::new(Kind::Usage, "a device name holds a NUL")),
        }
    }

    /// The words of the group that a word stands for; `None` if it is an ordinary word,
    /// `Some(None)` if it only looks like a group.
    pub fn words(&self, word: &OsStr) -> Option<Option<&[OsString]>> {
        let number = word.to_str()?.strip_prefix(MARK)?;
        let group = number.parse().ok().and_then(|number: usize| self.0.get(number));
        Some(group.map(Vec::as_slice))
    }
}

/// A device with a name: `NAME=DEVICE`, or `NAME=[ DEVICE OPTION… ]`.
#[derive(Debug)]
pub struct NamedDevice {
    /// The words of a command line of its own: DEVICE with its options, or `-- DEVICE`.
    pub words: Vec<OsString>,
    /// The groups among these.
    pub groups: Groups,
}

impl Groups {
    /// What follows the `=` of a device with a name ([`named`]).
    ///
    /// # Errors
    /// A text that says what is wrong with it.
    pub fn named_device(&self, device: &OsStr) -> Result<NamedDevice, String> {
        match self.words(device) {
            None if device.is_empty() => Err("no device after the =".to_string()),
            // Without brackets, a device without options.
            None => Ok(NamedDevice {
                words: vec!["--".into(), device.to_os_string()],
                groups: Groups::default(),
            }),
            Some(None) => Err("a device name contains a NUL".to_string()),
            Some(Some(words)) => {
                // It may contain commands in brackets.
                let (words, groups) = take(words.to_vec())?;
                Ok(NamedDevice { words, groups })
            }
        }
    }
}

/// The text before a bracket in `--export NAME=[ … ]`, whose group is not a command.
fn name_before<'word>(word: &'word OsStr, before: Option<&OsString>) -> Option<&'word str> {
    let name = word.to_str()?.strip_suffix('[').filter(|name| name.ends_with('='))?;
    let option = before.is_some_and(|before| before == "--export" || before == "-e");
    (option || name.starts_with("--export=")).then_some(name)
}

/// The name and the device of `NAME=DEVICE`, or of `NAME=[ … ]` after [`take`]; `None` if the word has no
/// `=`, or the name is not UTF-8.
pub fn named(word: &OsStr) -> Option<(&str, &OsStr)> {
    use std::os::unix::ffi::OsStrExt as _;
    let bytes = word.as_bytes();
    let at = bytes.iter().position(|&byte| byte == b'=')?;
    let name = std::str::from_utf8(&bytes[..at]).ok()?;
    Some((name, OsStr::from_bytes(&bytes[at + 1..])))
}

/// Prefix of the word that stands for a group. No program argument can contain a NUL.
const MARK: &str = "\0group ";

/// Replaces each group, from a word that is exactly `[`, or `NAME=[` for an export, to the matching
/// `]`, by one word. An error names what is unbalanced.
///
/// # Errors
/// The bracket without its counterpart.
pub fn take(words: Vec<OsString>) -> Result<(Vec<OsString>, Groups), String> {
    let mut kept = Vec::new();
    let mut groups = Groups::default();
    let mut open: Option<Vec<OsString>> = None;
    let mut name = String::new();
    let mut depth = 0_usize;
    let mut before: Option<OsString> = None;
    for word in words {
        let named = name_before(&word, before.as_ref());
        let opens = word == "[" || named.is_some();
        let closes = word == "]";
        before = Some(word.clone());
        match &mut open {
            None if opens => {
                open = Some(Vec::new());
                name = named.unwrap_or_default().to_string();
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
                kept.push(format!("{name}{MARK}{}", groups.0.len()).into());
                groups.0.extend(open.take());
            }
        }
    }
    match open {
        None => Ok((kept, groups)),
        Some(_) => Err("[ without ]: end the command with a word that is only ]".to_string()),
    }
}

/// A message about the command line, with groups as the user typed them.
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
        assert_eq!(groups.spec(&words[1]).unwrap(), DeviceSpec::Command(inner));
        assert_eq!(groups.spec(&words[3]).unwrap(), DeviceSpec::Command(vec!["d".into()]));
        assert_eq!(groups.spec(OsStr::new("[d]")).unwrap(), DeviceSpec::Path("[d]".into()));
        assert_eq!(readable(&format!("'{MARK}12' is wrong")), "'[ … ]' is wrong");
    }

    #[test]
    fn exports_have_groups_with_a_name() {
        let text = "serve --export a=[ d --layer x ] -e b=[ [ c ] ] --export=c=[ e ] grep x=[";
        let (words, groups) = take_text(text).unwrap();
        assert_eq!(words.len(), 8, "{words:?}");
        let group = |word: &OsStr, name: &str| {
            let mark = word.to_str().unwrap().strip_prefix(name).unwrap();
            groups.words(OsStr::new(mark)).unwrap().unwrap().to_vec()
        };
        assert_eq!(group(&words[2], "a="), ["d", "--layer", "x"]);
        assert_eq!(group(&words[4], "b="), ["[", "c", "]"]);
        assert_eq!(group(&words[5], "--export=c="), ["e"]);
        assert_eq!(words[7], "x=[", "only exports");
        let (_, groups) = take_text("copy [ blockhaul serve --export a=[ d ] ] t").unwrap();
        assert_eq!(groups.0[0].len(), 6);
        assert!(take_text("serve --export a=[ d").is_err());
    }

    #[test]
    fn a_named_device_is_a_command_line_of_its_own() {
        let (words, groups) = take_text("serve -e a=[ [ c ] --layer x ] -e b=d -e e=").unwrap();
        let device = |word: &OsStr| {
            let (_, device) = named(word).unwrap();
            groups.named_device(device)
        };
        let a = device(&words[2]).unwrap();
        assert_eq!(a.words[1..], ["--layer", "x"]);
        assert_eq!(a.groups.spec(&a.words[0]).unwrap(), DeviceSpec::Command(vec!["c".into()]));
        assert_eq!(device(&words[4]).unwrap().words, ["--", "d"]);
        assert_eq!(device(&words[6]).unwrap_err(), "no device after the =");
        let unknown = format!("f={MARK}9");
        assert_eq!(device(OsStr::new(&unknown)).unwrap_err(), "a device name contains a NUL");
    }

    #[test]
    fn unbalanced_groups_are_refused() {
        for bad in ["copy [ a", "copy a ]", "copy [ a [ b ] c", "copy [ ]", "["] {
            assert!(take_text(bad).is_err(), "{bad}");
        }
    }
}
