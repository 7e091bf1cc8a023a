//! `iso:FOLDER`: a CD with the contents of directories, made by xorriso, genisoimage or mkisofs.

use std::fs::File;
use std::path::Path;
use std::process::Command;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{Backend, Intent, Opened, Opening, Param, ParamKind, Target};

use crate::devices::made::{self, Folder};
use blockhaul_backends::support::{operand, split};

/// Programs that can make it; the first one found is used.
const PROGRAMS: [&str; 3] = ["xorriso", "genisoimage", "mkisofs"];

/// The backend `iso:FOLDER`.
pub struct Iso;

impl Backend for Iso {
    fn schemes(&self) -> &'static [&'static str] {
        &["iso"]
    }

    fn operand(&self) -> &'static str {
        "DIR,DIR…"
    }

    fn summary(&self) -> &'static str {
        "a CD with the files of directories, created by xorriso, genisoimage or mkisofs in $TMPDIR or \
         /var/tmp; use dir=NAME, which can be repeated, for a directory with a comma in its name; \
         read-only"
    }

    fn example(&self) -> &'static str {
        r#"
mkdir files && echo hello > files/hello.txt
blockhaul copy 'iso:files?params=-JrT' files.iso
"#
    }

    fn params(&self) -> &'static [Param] {
        const {
            &[
                Param {
                    name: "params",
                    kind: ParamKind::Text,
                    default: None,
                    doc: "Options for the program, in shell syntax: '-JrT -V \"My disk\"' keeps long \
                          names.",
                },
                Param {
                    name: "prog",
                    kind: ParamKind::Text,
                    default: None,
                    doc: "The program [default: the first of the three that is installed].",
                },
            ]
        }
    }

    fn takes_others(&self) -> bool {
        true
    }

    fn open(&self, target: Target) -> Opening<Opened> {
        Box::pin(async move {
            operand::source_only(&target)?;
            let name = operand::name(&target);
            let made = blockhaul_io::offload(move || make(&target)).await;
            let folder = made.map_err(|_| Error::new(Kind::Io, "iso: was not made"))??;
            let disk = folder.disk();
            let file =
                disk.to_str().ok_or_else(|| wrong("the temporary directory is not UTF-8"))?;
            // The file stays while it is open; the directory is removed.
            split::join("iso", name, vec![split::file(file, Intent::READ).await?])
        })
    }
}

fn wrong(text: impl std::fmt::Display) -> Error {
    Error::new(Kind::Usage, format!("iso: {text}"))
}

fn make(target: &Target) -> Result<Folder> {
    let mut folders: Vec<&str> =
        target.text()?.split(',').filter(|folder| !folder.is_empty()).collect();
    for (key, value) in target.args.others() {
        match key.as_str() {
            "dir" => folders.push(value),
            key => {
                let text = format!("unknown option {key:?}; known are dir, params, prog");
                return Err(wrong(text));
            }
        }
    }
    if folders.is_empty() {
        return Err(wrong("has no directory: write iso:DIR"));
    }
    let program = match target.args.text("prog") {
        Some(program) => program,
        None => PROGRAMS.into_iter().find(|program| made::have(program)).ok_or_else(|| {
            let text = format!("none of {} is installed", PROGRAMS.join(", "));
            Error::new(Kind::NotFound, format!("iso: {text}: install one, or set prog=")).complete()
        })?,
    };
    let folder = Folder::new()?;
    let out = File::create_new(folder.disk());
    let out = out.map_err(|error| Error::system("cannot create the file of the CD", error))?;
    let mut command = Command::new("/bin/sh");
    let params = target.args.text("params").unwrap_or_default();
    // Makes xorriso parse its command line as the others do.
    let kind = if Path::new(program).file_name().is_some_and(|name| name == "xorriso") {
        "-as mkisofs"
    } else {
        ""
    };
    command.arg("-c").arg(format!("exec \"$0\" {kind} -quiet {params} \"$@\"")).arg(program);
    for name in folders {
        // An absolute path cannot be mistaken for an option.
        let path = std::fs::canonicalize(name);
        let path = path
            .map_err(|error| Error::system(format!("cannot open the directory {name}"), error))?;
        command.arg(path);
    }
    made::run(command.stdout(out), program)?;
    Ok(folder)
}
