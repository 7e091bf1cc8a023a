//! The command line of nbddiscard and nbdzero.

use std::ffi::OsString;

use blockhaul_catalog::DeviceSpec;

use crate::getopt;
use crate::{ToolInvocation, common};

/// The options of both programs.
pub const OPTIONS: &str = "\
    c|check fast-zero h|help l|length= long-options o|offset= q|quiet short-options v|verbose \
    V|version y|yes z|zero";

const HELP: &str = "\
Discards or zeroes a disk, or a part of it. ALL DATA THERE IS LOST.

    nbddiscard [OPTIONS] NBD-URI
    nbdzero [OPTIONS] NBD-URI

This is blockhaul, with the command line of libnbd's nbddiscard and nbdzero.

    -c, --check             change nothing: fail if the disk has data (with -z: other than zeroes)
    -z, --zero              write zeroes, as nbdzero does
    --fast-zero             the same, or fail if that is not faster than writing
    -o, --offset=SIZE       begin there (0)
    -l, --length=SIZE       end after as many bytes (the end of the disk)
    -y, --yes               do not ask
    -q, --quiet             print no warnings
    -v, --verbose           print more detail
    -V, --version           print the version that this implements
";

/// The two names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiscardProgram {
    /// `nbddiscard`.
    Discard,
    /// `nbdzero`: zeroes by default.
    Zero,
}

impl DiscardProgram {
    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            DiscardProgram::Discard => "nbddiscard",
            DiscardProgram::Zero => "nbdzero",
        }
    }
}

/// A part of a disk that is discarded, zeroed or checked.
#[derive(Debug, PartialEq, Eq)]
pub struct DiscardRequest {
    /// The NBD URI.
    pub uri: String,
    /// The same, as a device.
    pub spec: DeviceSpec,
    /// Offset in bytes of the part.
    pub offset: u64,
    /// Length in bytes of the part; none: to the end of the disk.
    pub length: Option<u64>,
    /// Whether it is zeroed; otherwise it is discarded.
    pub zero: bool,
    /// Whether zeroing must be faster than writing.
    pub fast: bool,
    /// Whether it is only checked.
    pub check: bool,
    /// Whether the user is not asked.
    pub yes: bool,
    /// Whether no warnings are printed.
    pub quiet: bool,
    /// Whether more is printed.
    pub verbose: bool,
}

/// The meaning of a command line of nbddiscard or nbdzero.
///
/// # Errors
/// The word that is wrong.
pub fn translate(
    program: DiscardProgram,
    line: &[OsString],
) -> Result<ToolInvocation<DiscardRequest>, String> {
    let parts = getopt::parse(OPTIONS, line)
        .map_err(|text| format!("{text}; see {} --help", program.name()))?;
    let (mut offset, mut length) = (0, None);
    let mut given = Vec::new();
    for (means, value) in parts.options {
        if let Some(text) = common(means, program.name(), HELP, OPTIONS) {
            return Ok(ToolInvocation::Text(text));
        }
        match means {
            "offset" => offset = size(value)?,
            "length" => length = Some(size(value)?),
            means => given.push(means),
        }
    }
    let [uri] = &parts.operands[..] else {
        return Err("NBD-URI is required.  See --help or nbddiscard(1) man page.".to_string());
    };
    let uri = uri.to_str().filter(|uri| blockhaul_wire::uri::is_uri(uri));
    let uri = uri.ok_or("the operand is no NBD URI; those start with nbd:// or nbd+unix://")?;
    let spec = DeviceSpec::parse(uri.as_ref()).map_err(|error| error.to_string())?;
    let has = |name: &str| given.contains(&name);
    Ok(ToolInvocation::Run(DiscardRequest {
        uri: uri.to_string(),
        spec,
        offset,
        length,
        zero: program == DiscardProgram::Zero || has("zero") || has("fast-zero"),
        fast: has("fast-zero"),
        check: has("check"),
        yes: has("yes"),
        quiet: has("quiet"),
        verbose: has("verbose"),
    }))
}

fn size(value: Option<OsString>) -> Result<u64, String> {
    let text = value.unwrap_or_default();
    let text = text.to_string_lossy();
    blockhaul_catalog::parse_size(&text)
        .map_err(|_| format!("cannot parse offset/length parameter: {text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(program: DiscardProgram, text: &str) -> Result<DiscardRequest, String> {
        let words: Vec<OsString> = text.split_whitespace().map(OsString::from).collect();
        match translate(program, &words)? {
            ToolInvocation::Run(request) => Ok(request),
            ToolInvocation::Text(text) => Err(text),
        }
    }

    #[test]
    fn options_name_a_part_and_what_is_done_with_it() {
        let found = request(DiscardProgram::Discard, "-o 1M --length=512 -y nbd://a").unwrap();
        assert_eq!((found.offset, found.length, found.yes), (1 << 20, Some(512), true));
        assert!(!found.zero && !found.check);
        assert!(request(DiscardProgram::Zero, "-qc nbd://a").unwrap().zero);
        let fast = request(DiscardProgram::Discard, "--fast nbd://a").unwrap();
        assert!(fast.zero && fast.fast);
    }

    #[test]
    fn wrong_command_lines_are_refused() {
        for (text, part) in [
            ("", "NBD-URI is required"),
            ("nbd://a nbd://b", "NBD-URI is required"),
            ("disk.raw", "no NBD URI"),
            ("-o 1X nbd://a", "cannot parse offset/length parameter: 1X"),
            ("--what nbd://a", "--what"),
            ("--version", "nbdzero 1."),
        ] {
            let said = request(DiscardProgram::Zero, text).unwrap_err();
            assert!(said.contains(part), "{text}: {said}");
        }
    }
}
