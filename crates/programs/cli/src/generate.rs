//! Generates man pages and shell completions from the command line's definition.

use std::path::Path;

use crate::exit::{CommandFailure, CommandResult, FAILED};
use crate::{args, devices, exit, manual, out};

/// Writes a page for each command to `dir`, or prints the main page.
pub fn man(dir: Option<&Path>) -> CommandResult {
    let definition = args::definition();
    let Some(dir) = dir else {
        out::print(&pages(&definition)[0].text()?)?;
        return Ok(0);
    };
    std::fs::create_dir_all(dir).map_err(|error| {
        let why = exit::plain(&error);
        CommandFailure::new(FAILED, format!("cannot create the directory {}: {why}", dir.display()))
    })?;
    for page in pages(&definition) {
        write(&dir.join(format!("{}.1", page.name)), &page.text()?)?;
    }
    for (name, about, text) in [
        ("devices", "what blockhaul serves, copies and inspects", devices::devices_help()),
        ("layers", "what blockhaul puts over devices", devices::layers_help()),
    ] {
        let page = overview(name, about, &text);
        write(&dir.join(format!("blockhaul-{name}.7")), page.as_bytes())?;
    }
    Ok(0)
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), CommandFailure> {
    std::fs::write(path, bytes).map_err(|error| {
        let why = exit::plain(&error);
        CommandFailure::new(FAILED, format!("cannot write {}: {why}", path.display()))
    })
}

/// A page of section 7, from a topic of the help.
fn overview(name: &str, about: &str, text: &str) -> String {
    let title = format!("blockhaul-{name}").to_uppercase();
    format!(
        ".TH {title} 7 \"\" \"blockhaul {}\"\n.SH NAME\nblockhaul\\-{name} \\- {about}\n{}.SH \"SEE ALSO\"\n\
         blockhaul(1), blockhaul\\-copy(1), blockhaul\\-serve(1)\n",
        env!("CARGO_PKG_VERSION"),
        manual::sections(text)
    )
}

/// A page, for a command.
struct CommandPage {
    /// `blockhaul-ctl-layer-add`.
    name: String,
    /// The command as typed: `blockhaul ctl layer-add`.
    typed: String,
    /// The page of the parent command.
    above: Option<String>,
    command: clap::Command,
}

/// The page of the program, then those of its commands and subcommands.
fn pages(definition: &clap::Command) -> Vec<CommandPage> {
    let name = "blockhaul".to_string();
    let mut pages =
        vec![CommandPage { typed: name.clone(), name, above: None, command: definition.clone() }];
    let mut next = 0;
    while let Some(page) = pages.get(next) {
        let inner = page.command.get_subcommands().filter(|inner| !inner.is_hide_set());
        let inner = inner.map(|inner| CommandPage {
            name: format!("{}-{}", page.name, inner.get_name()),
            typed: format!("{} {}", page.typed, inner.get_name()),
            above: Some(page.name.clone()),
            command: inner.clone(),
        });
        let inner: Vec<_> = inner.collect();
        pages.extend(inner);
        next += 1;
    }
    pages
}

impl CommandPage {
    fn text(&self) -> Result<Vec<u8>, CommandFailure> {
        // Its text is laid out for a terminal; a page has no command `help`.
        let more = self.command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
        let command = self
            .command
            .clone()
            .name(self.name.clone())
            .bin_name(self.typed.clone())
            .version(env!("CARGO_PKG_VERSION"))
            .after_long_help(clap::builder::Resettable::Reset)
            // Only the program itself has --version.
            .disable_version_flag(self.above.is_some())
            .disable_help_subcommand(true);
        let mut bytes = Vec::new();
        clap_mangen::Man::new(command)
            .render(&mut bytes)
            .map_err(|error| CommandFailure::new(FAILED, exit::plain(&error)))?;
        bytes.extend_from_slice(manual::sections(&more).as_bytes());
        bytes.extend_from_slice(self.see_also().as_bytes());
        Ok(bytes)
    }

    /// Related pages: of the parent command and the subcommands, and of other programs.
    fn see_also(&self) -> String {
        let all = pages(&args::definition());
        let above = self.above.iter().cloned();
        let below = all.iter().filter(|page| page.above.as_ref() == Some(&self.name));
        let names = above.chain(below.map(|page| page.name.clone()));
        let mut names: Vec<_> = names.map(|name| format!("{name}(1)")).collect();
        names.extend(["blockhaul-devices(7)", "blockhaul-layers(7)"].map(str::to_string));
        let related = RELATED.iter().find(|(name, _)| *name == self.name);
        names.extend(related.iter().flat_map(|(_, names)| names.iter().map(ToString::to_string)));
        let names: Vec<_> = names.iter().map(|name| name.replace('-', "\\-")).collect();
        format!(".SH \"SEE ALSO\"\n{}\n", names.join(", "))
    }
}

/// Pages on related topics, besides those of parent and subcommands.
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
    ("blockhaul-check", &["blockhaul-copy(1)", "qemu-img(1)"]),
    ("blockhaul-checksum", &["blockhaul-compare(1)", "b3sum(1)", "sha256sum(1)", "blksum(1)"]),
    ("blockhaul-ctl", &["blockhaul-serve(1)"]),
    ("blockhaul-tls", &["blockhaul-serve(1)"]),
    ("blockhaul-tls-init", &["blockhaul-serve(1)", "certtool(1)", "psktool(1)"]),
    ("blockhaul-bench-device", &["blockhaul-copy(1)", "blockhaul-bench-load(1)"]),
    ("blockhaul-bench-load", &["blockhaul-bench-device(1)", "fio(1)"]),
    ("blockhaul-plugin", &["nbdkit(1)", "nbdkit-plugin(3)"]),
];

/// Prints completions for a shell.
pub fn completions(shell: clap_complete::Shell) -> CommandResult {
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
            if page.path().extension().is_some_and(|section| section == "7") {
                continue;
            }
            let text = std::fs::read_to_string(page.path()).unwrap();
            for section in ["SYNOPSIS", "OPTIONS", "EXIT STATUS", "EXAMPLES", "SEE ALSO"] {
                let heading = text.lines().filter(|line| {
                    line.strip_prefix(".SH ").is_some_and(|name| name.trim_matches('"') == section)
                });
                assert_eq!(heading.count(), 1, "{section} in {page:?}: {text}");
            }
            // Pages that it refers to exist.
            let also = text.rsplit_once("SEE ALSO\"\n").unwrap().1.replace("\\-", "-");
            for name in also.trim().split(", ").filter(|name| name.starts_with("blockhaul")) {
                let file = name.replace('(', ".").replace(')', "");
                assert!(dir.path().join(file).exists(), "{name} in {page:?}");
            }
        }
        // Only the program itself has a version.
        let text = std::fs::read_to_string(dir.path().join("blockhaul-copy.1")).unwrap();
        assert!(!text.contains("\\-\\-version") && !text.contains("\\-V"), "{text}");
        for (name, _) in RELATED {
            assert!(dir.path().join(format!("{name}.1")).exists(), "{name}");
        }
        // Its own sections, and no page that does not exist.
        let text = std::fs::read_to_string(dir.path().join("blockhaul-devices.7")).unwrap();
        assert!(text.contains("\n.SH \"DEVICES\"\n") && text.contains("memory:SIZE"), "{text}");
        let text = std::fs::read_to_string(dir.path().join("blockhaul-layers.7")).unwrap();
        assert!(text.contains("\n.SH \"LAYERS\"\n") && text.contains("readonly"), "{text}");
        let text = std::fs::read_to_string(dir.path().join("blockhaul.1")).unwrap();
        assert!(
            text.contains("\n.SH \"DEVICES AND LAYERS\"\n") && !text.contains("EXTRA"),
            "{text}"
        );
        assert!(dir.path().join("blockhaul-help.1").exists());
        // Subcommands, too, whose names the parent's page refers to.
        let text = std::fs::read_to_string(dir.path().join("blockhaul-bench-load.1")).unwrap();
        assert!(text.contains("blockhaul bench load") && text.contains("connections"), "{text}");
        assert!(!dir.path().join("blockhaul-bench-helper.1").exists());
        let text = std::fs::read_to_string(dir.path().join("blockhaul-ctl-layer-add.1")).unwrap();
        assert!(text.contains("blockhaul ctl layer\\-add\\fR"), "{text}");
        // A missing directory is made; one below a file cannot be.
        assert_eq!(man(Some(&dir.path().join("new/folder"))), Ok(0));
        let below = dir.path().join("blockhaul.1/folder");
        assert_eq!(man(Some(&below)).unwrap_err().status(), FAILED);
    }
}
