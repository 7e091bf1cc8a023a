//! `blockhaul restore`: a copy from a point of a store, after its digests were checked.

use std::ffi::OsString;
use std::path::Path;

use blockhaul_store::Store;

use crate::brackets::Groups;
use crate::exit::{self, Failure, Outcome, stored};
use crate::{args, chain, copy, logger};

/// Runs `blockhaul restore`.
pub fn run(args: &args::Restore, groups: &Groups) -> Outcome {
    logger::start(args.verbose);
    let store = Store::open(&args.dir).map_err(stored)?;
    let point = store.point(args.point.as_deref()).map_err(stored)?;
    let source = device(&args.dir, &point.name)?;
    let copy = as_copy(args, source)?;
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
    copy::run(&copy, groups)
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
fn as_copy(args: &args::Restore, source: OsString) -> Result<args::CopyArgs, Failure> {
    let words = ["blockhaul", "copy", "null:", "null:"].map(OsString::from).to_vec();
    let parsed = args::parse(words);
    let Ok(args::Cli { command: args::Command::Copy(mut copy) }) = parsed else {
        return Err(Failure::new(exit::FAILED, "the options of blockhaul copy have changed"));
    };
    copy.source = Some(source);
    copy.target = Some(args.target.clone());
    copy.verify = args.verify;
    copy.flush = true;
    copy.journal = args.journal.clone();
    copy.progress = args.progress;
    copy.no_progress = args.no_progress;
    copy.verbose = args.verbose;
    Ok(*copy)
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
