//! `--ranges`: lists of changes that other programs print. `--ranges-command`: a command that prints one.

mod command;

use std::io::Read;
use std::path::Path;

use blockhaul_change_lists::ChangeList;
use blockhaul_io::plain;

use crate::error::{Result, TransferError, TransferErrorKind, TransferStep};

/// A list of ranges.
#[derive(Debug)]
pub(crate) struct RangeList {
    /// The option and the file or command, for messages.
    name: String,
    list: ChangeList,
}

impl RangeList {
    /// Reads a file, or standard input for `-`.
    ///
    /// # Errors
    /// [`TransferErrorKind::Open`] if it cannot be read, or is not a whole list of a known kind.
    /// [`TransferErrorKind::Request`] if it is a directory.
    pub fn read(path: &Path) -> Result<RangeList> {
        let name = format!("--ranges: {}", path.display());
        if path.is_dir() {
            let text = format!("{name}: it is a directory: give the name of a file in it");
            return Err(TransferError::new(
                TransferErrorKind::Request,
                TransferStep::Selection,
                text,
            ));
        }
        let list = if path == Path::new("-") {
            parse(&mut std::io::stdin().lock())
        } else {
            let file = std::fs::File::open(path);
            file.map_err(|error| plain(&error)).and_then(|mut file| parse(&mut file))
        };
        RangeList::new(name, list)
    }

    /// Runs a command of the shell, and reads its output. Waits for its end.
    ///
    /// # Errors
    /// As [`RangeList::read`]; and if the command fails, whatever it has printed.
    pub fn of_command(script: &str) -> Result<RangeList> {
        let name = format!("--ranges-command: {}", command::shown(script));
        RangeList::new(name, command::read_output(script, parse))
    }

    fn new(name: String, list: Result<ChangeList, String>) -> Result<RangeList> {
        match list {
            Ok(list) => Ok(RangeList { name, list }),
            Err(why) => {
                let text = format!("{name}: {why}");
                Err(TransferError::new(TransferErrorKind::Open, TransferStep::Selection, text))
            }
        }
    }

    /// The ranges for a source of `size` bytes: offsets and lengths, ascending, apart from each other and
    /// not empty. A list that is complete for a part of it only is refused unless `partial`: then it is
    /// reported as a warning what is left out.
    ///
    /// # Errors
    /// Why it is not the list of such a source, with a remedy.
    pub fn fit(self, size: u64, partial: bool) -> Result<Vec<(u64, u64)>, String> {
        let RangeList { name, list } = self;
        let fitted = list.fit(size).map_err(|error| format!("{name}: {error}"))?;
        if let Some(incomplete) = fitted.incomplete {
            if !partial {
                let partial = "or copy only what it covers with --ranges-partial";
                return Err(format!("{name}: {}, {partial}", incomplete.error));
            }
            log::warn!("{name}: {}", incomplete.missing);
        }
        Ok(fitted.ranges)
    }
}

fn parse(from: &mut dyn Read) -> Result<ChangeList, String> {
    ChangeList::read(from).map_err(|error| error.to_string())
}
