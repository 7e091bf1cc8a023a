//! `blockhaul restore`: a copy from a point of a store, after its digests were checked.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use blockhaul_catalog::Spec;
use blockhaul_store::Store;
use blockhaul_transfer::{CopyRequest, TransferOptions};

use crate::args::{self, ImageFormat};
use crate::brackets::Groups;
use crate::copy::copy_options::checked_request;
use crate::copy::{self, RunOptions};
use crate::exit::{self, Failure, Outcome, stored};
use crate::progress::Style;
use crate::session::SessionOptions;
use crate::{chain, logger};

/// Runs `blockhaul restore`.
pub fn run(args: &args::Restore, groups: &Groups) -> Outcome {
    logger::start(args.verbose);
    let store = Store::open(&args.dir).map_err(stored)?;
    let point = store.point(args.point.as_deref()).map_err(stored)?;
    let source = device(&args.dir, &point.name)?;
    store.check(point).map_err(damaged)?;
    if !args.no_check {
        let config = blockhaul_io::Config::default();
        let found = chain::check(&config, &store, std::slice::from_ref(point))?;
        if let Some(problem) = found.problems.first() {
            let text = format!(
                "point {:?} is damaged: {problem}: restore another point, or this one as it is with \
                 --no-check",
                point.name
            );
            return Err(Failure::new(exit::DIFFERENT, text));
        }
    }
    copy::run_request(request(args, groups, &source)?, &run_options(args))
}

fn damaged(error: blockhaul_block::Error) -> Failure {
    Failure::new(exit::SOURCE, format!("{error}: restore another point"))
}

/// The description of a point, by its name.
fn device(dir: &Path, point: &str) -> Result<OsString, Failure> {
    let dir = dir
        .to_str()
        .ok_or_else(|| Failure::usage(format!("{}: the name is not UTF-8", dir.display())))?;
    Ok(format!("backup:{}?point={}", escaped(dir), escaped(point)).into())
}

/// Text with everything escaped that has a meaning in the description of a device.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        match c {
            '%' | '?' | '&' | '#' | '=' | '+' => escaped += &format!("%{:02X}", u32::from(c)),
            c => escaped.push(c),
        }
    }
    escaped
}

/// The copy that restores.
fn request(args: &args::Restore, groups: &Groups, source: &OsStr) -> Result<CopyRequest, Failure> {
    let options = TransferOptions {
        verify: args.verify,
        flush: true,
        journal: args.journal.clone(),
        ..TransferOptions::default()
    };
    let sides = [Spec::parse(source)?, groups.spec(&args.target)?];
    checked_request(&ImageFormat::default(), options, sides)
}

/// What is shown of it.
fn run_options(args: &args::Restore) -> RunOptions {
    let args::Restore { progress, no_progress, verbose, .. } = *args;
    let shows_map = progress == Some(Style::Map);
    let session = SessionOptions { shows_map, ..SessionOptions::default() };
    RunOptions { progress, no_progress, verbose, session }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_escaped_in_descriptions() {
        let device = device(Path::new("a b/100%?x"), "2026-11-23T10:00:00+01:00&c=1").unwrap();
        let spec = blockhaul_catalog::Spec::parse(&device).unwrap();
        let registry = crate::devices::registry(std::time::Duration::ZERO);
        let (_, target) = registry.target(&spec, blockhaul_catalog::Intent::READ).unwrap();
        assert_eq!(target.path(), Path::new("a b/100%?x"));
        assert_eq!(target.args.text("point"), Some("2026-11-23T10:00:00+01:00&c=1"));
    }
}
