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
    Ok(bytes)
}

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
        for name in ["blockhaul", "blockhaul-serve", "blockhaul-copy", "blockhaul-info"] {
            let text = std::fs::read_to_string(dir.path().join(format!("{name}.1"))).unwrap();
            assert!(text.contains("EXIT STATUS"), "{name}: {text}");
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
