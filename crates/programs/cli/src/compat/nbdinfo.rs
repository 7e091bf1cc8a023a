//! `nbdinfo`: its command line, answered by `blockhaul info`.

use std::collections::BTreeMap;
use std::ffi::OsString;

use super::options::{self, Opt, Value, alias, opt};
use super::stand_in::{answer, failure, log_as, own, version};
use crate::args::Command;
use crate::brackets;
use crate::exit::{FAILED, Failure, Outcome};
use crate::info;

const OPTIONS: &[Opt] = &[
    opt("help", None, Value::No),
    opt("can", None, Value::Must),
    opt("cannot", None, Value::Must),
    alias("can-not", Value::Must, "cannot"),
    alias("cant", Value::Must, "cannot"),
    opt("color", None, Value::No),
    alias("colors", Value::No, "color"),
    alias("colour", Value::No, "color"),
    alias("colours", Value::No, "color"),
    opt("no-color", None, Value::No),
    alias("no-colors", Value::No, "no-color"),
    alias("no-colour", Value::No, "no-color"),
    alias("no-colours", Value::No, "no-color"),
    opt("content", None, Value::No),
    opt("no-content", None, Value::No),
    alias("has", Value::Must, "can"),
    alias("hasnot", Value::Must, "cannot"),
    alias("has-not", Value::Must, "cannot"),
    alias("hasnt", Value::Must, "cannot"),
    alias("have", Value::Must, "can"),
    alias("havent", Value::Must, "cannot"),
    alias("havenot", Value::Must, "cannot"),
    alias("have-not", Value::Must, "cannot"),
    alias("is", Value::Must, "can"),
    alias("isnot", Value::Must, "cannot"),
    alias("is-not", Value::Must, "cannot"),
    alias("isnt", Value::Must, "cannot"),
    opt("json", None, Value::No),
    opt("list", Some(b'L'), Value::No),
    opt("long-options", None, Value::No),
    opt("map", None, Value::May),
    opt("short-options", None, Value::No),
    opt("size", None, Value::No),
    alias("total", Value::No, "totals"),
    opt("totals", None, Value::No),
    opt("uri", None, Value::No),
    opt("version", Some(b'V'), Value::No),
];

const HELP: &str = "\
Shows what NBD servers export.

    nbdinfo [OPTIONS] NBD-URI | [ CMD ARG... ]

This is blockhaul in the place of libnbd's nbdinfo.

    --json                  print JSON
    -L, --list              all exports of the server
    --size                  only the size in bytes
    --uri                   only the canonical URI
    --map[=CONTEXT]         which parts hold data, or what another context tells
    --totals                with --map: how much there is of each
    --can X, --is X, --has X, --cannot X, --isnt X, ...
                            answer by the exit status: 0 for yes, 2 for no
    --content, --no-content guess what the export holds, or do not
    --color, --no-color     use colours, or none
    -V, --version           the version of nbdinfo that this one follows

`blockhaul info --help` tells more.
";

/// Query options; only one at a time is allowed.
const QUESTIONS: &[&str] = &["can", "cannot", "list", "map", "size", "uri"];

/// Options of which the later one counts.
const OPPOSITES: &[(&str, &str)] = &[("color", "no-color"), ("content", "no-content")];

/// Runs nbdinfo with these words.
pub fn run(words: &[OsString]) -> Outcome {
    let (words, groups) = brackets::take(words.to_vec()).map_err(failure)?;
    let parts = options::parse(OPTIONS, &words)
        .map_err(|text| failure(format!("{text}; see nbdinfo --help")))?;
    let mut settings: BTreeMap<&str, Option<OsString>> = BTreeMap::new();
    for (means, value) in parts.options {
        match means {
            "help" => return answer(HELP),
            "version" => return answer(&version("nbdinfo")),
            "long-options" => return answer(&options::long_list(OPTIONS)),
            "short-options" => return answer(&options::short_list(OPTIONS)),
            _ => {}
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
        return Err(failure(format!("--{one} and --{other} are two questions: ask one at a time")));
    }
    if settings.contains_key("totals") && !settings.contains_key("map") {
        return Err(failure("--totals sums up a map: give it with --map"));
    }
    let [export] = &parts.operands[..] else {
        let text = "give one NBD URI or one [ CMD ARG... ]; see nbdinfo --help";
        return Err(failure(text));
    };
    let mut own_words: Vec<OsString> = vec!["blockhaul".into(), "info".into()];
    for (name, value) in settings {
        let mut word = OsString::from(format!("--{name}"));
        if let Some(value) = value {
            word.push("=");
            word.push(value);
        }
        own_words.push(word);
    }
    own_words.push("--".into());
    match groups.spec(export)? {
        blockhaul_catalog::Spec::Command(command) => {
            own_words.push("[".into());
            own_words.extend(command);
            own_words.push("]".into());
        }
        _ if export.to_str().is_some_and(blockhaul_wire::uri::is_uri) => {
            own_words.push(export.clone())
        }
        _ => {
            let text = format!(
                "{} is no NBD URI; those start with nbd:// or nbd+unix:// (blockhaul info takes \
                 files, too)",
                export.display()
            );
            return Err(failure(text));
        }
    }
    log_as("nbdinfo", false);
    let (cli, groups) = own(own_words)?;
    let Command::Info(args) = cli.command else {
        return Err(failure("the command line was not understood"));
    };
    info::run(&args, &groups).map_err(|failure: Failure| failure.with_status(FAILED))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(text: &str) -> (u8, String) {
        let words: Vec<OsString> = text.split_whitespace().map(OsString::from).collect();
        match run(&words) {
            Ok(status) => (status, String::new()),
            Err(failure) => (failure.status(), failure.to_string()),
        }
    }

    #[test]
    fn wrong_command_lines_end_with_1_and_say_why() {
        let cases = [
            ("", "one NBD URI"),
            ("nbd://a nbd://b", "one NBD URI"),
            ("--list --size nbd://a", "one at a time"),
            ("--is x --cannot y nbd://a", "one at a time"),
            ("--totals nbd://a", "--map"),
            ("--what nbd://a", "--what"),
            ("disk.raw", "no NBD URI"),
            ("memory:1m", "no NBD URI"),
            ("[ a", "[ without ]"),
            ("--can fly nbd+unix:///?socket=/no/such", "fly"),
        ];
        for (text, part) in cases {
            let (status, said) = status(text);
            assert_eq!(status, FAILED, "{text}");
            assert!(said.contains(part), "{text}: {said}");
        }
    }

    #[test]
    fn every_option_is_known_to_info() {
        for opt in OPTIONS.iter().filter(|opt| !["help", "version"].contains(&opt.means)) {
            if opt.long.ends_with("-options") {
                continue;
            }
            let map = if opt.means == "totals" { " --map" } else { "" };
            let value = if opt.value == Value::Must { " write" } else { "" };
            let (status, said) =
                status(&format!("--{}{value}{map} nbd+unix:///?socket=/no/such", opt.long));
            // The command line is fine; the server is not there.
            assert_eq!(status, FAILED, "{}", opt.long);
            assert!(said.contains("/no/such"), "{}: {said}", opt.long);
        }
    }
}
