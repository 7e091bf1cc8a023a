//! Files with settings: certificates, request fields, passwords.

use std::io::Read as _;
use std::path::Path;

use blockhaul_block::{Error, Kind, Result};

/// Reads a file of at most `most` bytes. Blocks.
///
/// # Errors
/// The file cannot be read, is longer, or is not UTF-8.
pub(crate) fn read_text(file: &Path, most: u64) -> Result<String> {
    let shown = file.display();
    let failed = |error| Error::system(format!("cannot read {shown}"), error);
    let mut bytes = Vec::new();
    let opened = blockhaul_io::open_regular_file(file).map_err(failed)?;
    opened.take(most + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > most {
        let text = format!("{shown} has more than {most} bytes");
        return Err(Error::new(Kind::Invalid, text).with_remedy("check the name of the file"));
    }
    String::from_utf8(bytes).map_err(|_| {
        let text = format!("{shown} is not text in UTF-8");
        Error::new(Kind::Invalid, text).with_remedy("check the name of the file")
    })
}
