//! The command line of nbddump.

use std::ffi::{OsStr, OsString};

use blockhaul_catalog::{DeviceSpec, brackets};

use crate::getopt;
use crate::{ToolInvocation, common};

/// nbddump's options.
pub const OPTIONS: &str = "\
    help V|version color colors:color colour:color colours:color long-options no-color \
    no-colors:no-color no-colour:no-color no-colours:no-color n|length= limit:length= \
    o|offset= skip:offset= short-options";

const HELP: &str = "\
Shows the content of a disk in hexadecimal.

    nbddump [OPTIONS] NBD-URI | [ CMD ARG... ]

This is blockhaul, with the command line of libnbd's nbddump.

    -n N, --length=N        end after N bytes
    -o N, --offset=N        begin at this offset in bytes
    --color, --no-color     use colours, or do not [default: on a terminal]
    -V, --version           print the version of nbddump that this implements
";

/// What to show.
#[derive(Debug, PartialEq, Eq)]
pub struct DumpRequest {
    /// The disk: an NBD URI, or the command of a server.
    pub spec: DeviceSpec,
    /// Colours; none: on a terminal.
    pub color: Option<bool>,
    /// Offset in bytes of the first byte.
    pub offset: u64,
    /// Maximum number of bytes.
    pub length: u64,
}

/// The meaning of a command line of nbddump.
///
/// # Errors
/// What is wrong with it.
pub fn translate(line: &[OsString]) -> Result<ToolInvocation<DumpRequest>, String> {
    let (line, groups) = brackets::take(line.to_vec())?;
    let parts =
        getopt::parse(OPTIONS, &line).map_err(|text| format!("{text}; see nbddump --help"))?;
    let mut color = None;
    let mut offset = 0;
    let mut length = u64::MAX;
    for (means, value) in parts.options {
        if let Some(text) = common(means, "nbddump", HELP, OPTIONS) {
            return Ok(ToolInvocation::Text(text));
        }
        let value = value.as_deref().unwrap_or_default();
        match means {
            "color" => color = Some(true),
            "no-color" => color = Some(false),
            "offset" => offset = number("offset", value)?,
            "length" => length = number("length", value)?,
            _ => {}
        }
    }
    let [export] = &parts.operands[..] else {
        return Err("give one NBD URI or one [ CMD ARG... ]; see nbddump --help".to_string());
    };
    let spec = groups.spec(export).map_err(|error| error.to_string())?;
    let is_uri = export.to_str().is_some_and(blockhaul_wire::uri::is_uri);
    if !is_uri && !matches!(spec, DeviceSpec::Command(_)) {
        return Err(format!(
            "{} is no NBD URI; those start with nbd:// or nbd+unix://",
            export.display()
        ));
    }
    Ok(ToolInvocation::Run(DumpRequest { spec, color, offset, length }))
}

/// The digits at the start of a value, as nbddump reads it: a suffix is ignored, and a negative
/// number wraps.
fn number(option: &str, value: &OsStr) -> Result<u64, String> {
    let wrong = || format!("could not parse --{option} option: {}", value.display());
    let text = value.to_str().ok_or_else(wrong)?.trim_start();
    let (negative, text) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let digits = text.get(..end).filter(|digits| !digits.is_empty()).ok_or_else(wrong)?;
    let number = digits.parse().unwrap_or(u64::MAX);
    Ok(if negative { number.wrapping_neg() } else { number })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<DumpRequest, String> {
        let words: Vec<OsString> = text.split_whitespace().map(OsString::from).collect();
        match translate(&words)? {
            ToolInvocation::Run(dump) => Ok(dump),
            ToolInvocation::Text(text) => Err(text),
        }
    }

    #[test]
    fn numbers_are_read_as_nbddump_does() {
        let dump = read("-n 1M --offset=+17x --colour --no-color nbd://a").unwrap();
        assert_eq!((dump.length, dump.offset, dump.color), (1, 17, Some(false)));
        let dump = read("--limit=-1 --skip 0x20 [ qemu-nbd disk ]").unwrap();
        assert_eq!((dump.length, dump.offset, dump.color), (u64::MAX, 0, None));
        assert_eq!(dump.spec.to_string(), "[ qemu-nbd disk ]");
    }

    #[test]
    fn wrong_command_lines_are_refused() {
        for (text, part) in [
            ("", "give one NBD URI"),
            ("nbd://a nbd://b", "give one NBD URI"),
            ("disk.raw", "is no NBD URI"),
            ("-n x nbd://a", "could not parse --length option: x"),
            ("--skip= nbd://a", "could not parse --offset option"),
            ("--what nbd://a", "--what"),
            ("--version", "nbddump 1.24.4\nlibnbd"),
        ] {
            let said = read(text).unwrap_err();
            assert!(said.contains(part), "{text}: {said}");
        }
    }
}
