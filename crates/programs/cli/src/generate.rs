//! Man pages and shell completions, from the command line's definition.

use std::path::Path;

use crate::exit::{FAILED, Failure, Outcome};
use crate::{args, exit, manual, out};

/// Writes a page for each command to `dir`, or prints the main page.
pub fn man(dir: Option<&Path>) -> Outcome {
    let definition = args::definition();
    let Some(dir) = dir else {
        out::print(&page(&definition, "blockhaul")?)?;
        return Ok(0);
    };
    std::fs::create_dir_all(dir).map_err(|error| {
        let why = exit::plain(&error);
        Failure::new(FAILED, format!("cannot make the folder {}: {why}", dir.display()))
    })?;
    let mut pages = vec![("blockhaul".to_string(), definition.clone())];
    below("blockhaul", &definition, &mut pages);
    for (name, command) in pages {
        let path = dir.join(format!("{name}.1"));
        std::fs::write(&path, page(&command, &name)?).map_err(|error| {
            let why = exit::plain(&error);
            Failure::new(FAILED, format!("cannot write {}: {why}", path.display()))
        })?;
    }
    Ok(0)
}

/// The commands of a command, and theirs.
fn below(name: &str, command: &clap::Command, pages: &mut Vec<(String, clap::Command)>) {
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
        let name = format!("{name}-{}", inner.get_name());
        pages.push((name.clone(), inner.clone()));
        below(&name, inner, pages);
    }
}

fn page(command: &clap::Command, name: &str) -> Result<Vec<u8>, Failure> {
    let page = name.to_string();
    let (name, bin) = (name.to_string(), name.replace('-', " "));
    // Its text is laid out for a terminal; a page has no command `help`, which has none itself.
    let more = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
    let command = command
        .clone()
        .name(name)
        .bin_name(bin)
        .version(env!("CARGO_PKG_VERSION"))
        .after_long_help(clap::builder::Resettable::Reset)
        .disable_help_subcommand(true);
    let mut bytes = Vec::new();
    clap_mangen::Man::new(command)
        .render(&mut bytes)
        .map_err(|error| Failure::new(FAILED, exit::plain(&error)))?;
    bytes.extend_from_slice(manual::sections(&more).as_bytes());
    bytes.extend_from_slice(see_also(&page).as_bytes());
    Ok(bytes)
}

/// The pages to read next: of the command above and the commands below, and of other programs.
fn see_also(page: &str) -> String {
    let definition = args::definition();
    let mut pages = vec![("blockhaul".to_string(), definition.clone())];
    below("blockhaul", &definition, &mut pages);
    let mut names: Vec<String> = Vec::new();
    if let Some((above, _)) = page.rsplit_once('-') {
        names.push(format!("{above}(1)"));
    }
    let inner = pages.iter().filter_map(|(name, _)| name.strip_prefix(page)?.strip_prefix('-'));
    names.extend(inner.filter(|name| !name.contains('-')).map(|name| format!("{page}-{name}(1)")));
    let related = RELATED.iter().find(|(name, _)| *name == page);
    names.extend(related.iter().flat_map(|(_, names)| names.iter().map(ToString::to_string)));
    let names: Vec<_> = names.iter().map(|name| name.replace('-', "\\-")).collect();
    format!(".SH \"SEE ALSO\"\n{}\n", names.join(", "))
}

/// Pages about the same matter, besides those of commands above and below.
const RELATED: &[(&str, &[&str])] = &[
    ("blockhaul", &["nbdkit(1)", "nbdcopy(1)", "nbdinfo(1)", "qemu-nbd(8)", "qemu-img(1)"]),
    (
        "blockhaul-serve",
        &["blockhaul-ctl(1)", "blockhaul-tls-init(1)", "nbdkit(1)", "qemu-nbd(8)", "nbd-client(8)"],
    ),
    (
        "blockhaul-copy",
        &["blockhaul-verify(1)", "blockhaul-compare(1)", "nbdcopy(1)", "qemu-img(1)"],
    ),
    ("blockhaul-info", &["blockhaul-map(1)", "nbdinfo(1)", "qemu-img(1)"]),
    ("blockhaul-map", &["blockhaul-info(1)", "nbdinfo(1)"]),
    ("blockhaul-compare", &["blockhaul-checksum(1)", "blockhaul-verify(1)", "qemu-img(1)"]),
    ("blockhaul-verify", &["blockhaul-copy(1)", "blockhaul-compare(1)"]),
    ("blockhaul-checksum", &["blockhaul-compare(1)", "b3sum(1)", "sha256sum(1)", "blksum(1)"]),
    ("blockhaul-ctl", &["blockhaul-serve(1)"]),
    ("blockhaul-tls", &["blockhaul-serve(1)"]),
    ("blockhaul-tls-init", &["blockhaul-serve(1)", "certtool(1)", "psktool(1)"]),
    ("blockhaul-bench-device", &["blockhaul-copy(1)", "blockhaul-bench-load(1)"]),
    ("blockhaul-bench-load", &["blockhaul-bench-device(1)", "fio(1)"]),
    ("blockhaul-plugin", &["nbdkit(1)", "nbdkit-plugin(3)"]),
];

/// Prints completions for a shell.
pub fn completions(shell: clap_complete::Shell) -> Outcome {
    let mut bytes = Vec::new();
    clap_complete::generate(shell, &mut args::definition(), "blockhaul", &mut bytes);
    out::print(&bytes)?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_visible_command_gets_a_page() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(man(Some(dir.path())), Ok(0));
        let pages: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(Result::unwrap).collect();
        assert!(pages.len() > 20, "{pages:?}");
        for page in pages {
            let text = std::fs::read_to_string(page.path()).unwrap();
            for section in ["SYNOPSIS", "OPTIONS", "EXIT STATUS", "EXAMPLES", "SEE ALSO"] {
                let heading = text.lines().filter(|line| {
                    line.strip_prefix(".SH ").is_some_and(|name| name.trim_matches('"') == section)
                });
                assert_eq!(heading.count(), 1, "{section} in {page:?}: {text}");
            }
            // Pages that it refers to are there.
            let also = text.rsplit_once("SEE ALSO\"\n").unwrap().1.replace("\\-", "-");
            for name in also.trim().split(", ").filter(|name| name.starts_with("blockhaul")) {
                let file = name.trim_end_matches("(1)");
                assert!(dir.path().join(format!("{file}.1")).exists(), "{name} in {page:?}");
            }
        }
        for (name, _) in RELATED {
            assert!(dir.path().join(format!("{name}.1")).exists(), "{name}");
        }
        assert!(!dir.path().join("blockhaul-man.1").exists());
        // Sections of their own, and no page that is not there.
        let text = std::fs::read_to_string(dir.path().join("blockhaul.1")).unwrap();
        assert!(text.contains("\n.SH \"DEVICES\"\n") && !text.contains("EXTRA"), "{text}");
        assert!(!text.contains("help(1)"), "{text}");
        // Commands of commands, too, whose names the page above refers to.
        let text = std::fs::read_to_string(dir.path().join("blockhaul-bench-load.1")).unwrap();
        assert!(text.contains("blockhaul bench load") && text.contains("connections"), "{text}");
        assert!(!dir.path().join("blockhaul-bench-helper.1").exists());
        // A folder that is missing is made; one below a file cannot be.
        assert_eq!(man(Some(&dir.path().join("new/folder"))), Ok(0));
        let below = dir.path().join("blockhaul.1/folder");
        assert_eq!(man(Some(&below)).unwrap_err().status(), FAILED);
    }
}
