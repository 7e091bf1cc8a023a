//! The command line of nbdinfo as that of `blockhaul info`.

use std::collections::BTreeMap;
use std::ffi::OsString;

use blockhaul_catalog::{DeviceSpec, brackets};

use crate::getopt;
use crate::{ToolInvocation, common, words};

/// nbdinfo's options.
pub const OPTIONS: &str = "\
    help can= cannot= can-not:cannot= cant:cannot= color colors:color colour:color \
    colours:color no-color no-colors:no-color no-colour:no-color no-colours:no-color content \
    no-content has:can= hasnot:cannot= has-not:cannot= hasnt:cannot= have:can= havent:cannot= \
    havenot:cannot= have-not:cannot= is:can= isnot:cannot= is-not:cannot= isnt:cannot= json \
    L|list long-options map=? short-options size total:totals totals uri V|version";

const HELP: &str = "\
Shows what NBD servers export.

    nbdinfo [OPTIONS] NBD-URI | [ CMD ARG... ]

This is blockhaul, with the command line of libnbd's nbdinfo.

    --json                  print JSON
    -L, --list              list all exports of the server
    --size                  print only the size in bytes
    --uri                   print only the canonical URI
    --map[=CONTEXT]         show which parts hold data, or another metadata context
    --totals                with --map: print a summary by type
    --can X, --is X, --has X, --cannot X, --isnt X, ...
                            exit with 0 for yes, 2 for no
    --content, --no-content detect the content of the export, or do not
    --color, --no-color     use colours, or do not
    -V, --version           print the version of nbdinfo that this implements

See `blockhaul info --help` for details.
";

/// Query options; only one at a time is allowed.
const QUESTIONS: &[&str] = &["can", "cannot", "list", "map", "size", "uri"];

/// Options of which the later one counts.
const OPPOSITES: &[(&str, &str)] = &[("color", "no-color"), ("content", "no-content")];

/// The words of `blockhaul info` for these of nbdinfo.
pub fn translate(line: &[OsString]) -> Result<ToolInvocation<Vec<OsString>>, String> {
    let (line, groups) = brackets::take(line.to_vec())?;
    let parts =
        getopt::parse(OPTIONS, &line).map_err(|text| format!("{text}; see nbdinfo --help"))?;
    let mut settings: BTreeMap<&str, Option<OsString>> = BTreeMap::new();
    for (means, value) in parts.options {
        if let Some(text) = common(means, "nbdinfo", HELP, OPTIONS) {
            return Ok(ToolInvocation::Text(text));
        }
        for (one, other) in OPPOSITES {
            if means == *one || means == *other {
                settings.remove(if means == *one { other } else { one });
            }
        }
        settings.insert(means, value);
    }
    let asked: Vec<&&str> = QUESTIONS.iter().filter(|name| settings.contains_key(**name)).collect();
    if let [one, other, ..] = asked[..] {
        return Err(format!("--{one} and --{other} exclude each other"));
    }
    if settings.contains_key("totals") && !settings.contains_key("map") {
        return Err("--totals needs --map".to_string());
    }
    let [export] = &parts.operands[..] else {
        return Err("give one NBD URI or one [ CMD ARG... ]; see nbdinfo --help".to_string());
    };
    let mut own = words(&["blockhaul", "info"]);
    for (name, value) in settings {
        let mut word = OsString::from(format!("--{name}"));
        if let Some(value) = value {
            word.push("=");
            word.push(value);
        }
        own.push(word);
    }
    own.push("--".into());
    match groups.spec(export).map_err(|error| error.to_string())? {
        DeviceSpec::Command(command) => {
            own.push("[".into());
            own.extend(command);
            own.push("]".into());
        }
        _ if export.to_str().is_some_and(blockhaul_wire::uri::is_uri) => own.push(export.clone()),
        _ => {
            return Err(format!(
                "{} is no NBD URI; those start with nbd:// or nbd+unix:// (blockhaul info takes \
                 files, too)",
                export.display()
            ));
        }
    }
    Ok(ToolInvocation::Run(own))
}
