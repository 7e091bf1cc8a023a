//! `mount.blockhaul`: the name under which mount(8) starts this program for lines of `/etc/fstab` and for
//! `mount -t blockhaul`. Its command line (mount(8), "External helpers") becomes that of `blockhaul mount`.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use crate::exit::{CommandFailure, CommandResult};

/// The name.
const NAME: &str = "mount.blockhaul";

/// Options that concern mount(8), systemd or all file systems, and change nothing here. FUSE sets nosuid
/// and nodev itself.
const IGNORED: &[&str] = &[
    "defaults",
    "auto",
    "noauto",
    "user",
    "nouser",
    "users",
    "owner",
    "group",
    "nofail",
    "_netdev",
    "async",
    "suid",
    "nosuid",
    "dev",
    "nodev",
    "exec",
    "noexec",
    "atime",
    "noatime",
    "relatime",
    "norelatime",
    "strictatime",
    "diratime",
    "nodiratime",
    "lazytime",
    "nolazytime",
];
/// Prefixes of further ones.
const IGNORED_PREFIXES: &[&str] = &["x-", "X-", "comment="];

/// Options that have a value, and the options of `blockhaul mount`.
const WITH_VALUE: &[(&str, &str)] = &[
    ("export", "--export"),
    ("layer", "--layer"),
    ("partition", "--partition"),
    ("cache", "--cache"),
    ("timeout", "--timeout"),
    ("workers", "--workers"),
    ("memory", "--memory"),
    ("engine", "--engine"),
    ("pid-file", "--pid-file"),
];

/// Runs the helper, if this program was started under its name. It returns when the device is mounted.
pub fn run(words: &[OsString]) -> Option<CommandResult> {
    let (name, words) = words.split_first()?;
    let is_helper = Path::new(name).file_name() == Some(OsStr::new(NAME));
    is_helper.then(|| match translated(words) {
        Ok(Some(words)) => crate::serve::again_in_background(&words),
        // With -f nothing is mounted.
        Ok(None) => Ok(0),
        Err(text) => Err(CommandFailure::usage(text)),
    })
}

/// The words of `blockhaul mount`; none if nothing is to be mounted.
fn translated(words: &[OsString]) -> Result<Option<Vec<OsString>>, String> {
    let usage = || format!("usage: {NAME} DEVICE TARGET [-o OPTIONS]");
    let mut places = Vec::new();
    let mut made: Vec<OsString> = ["mount", "--in-background"].map(OsString::from).into();
    let mut sloppy = false;
    let mut fake = false;
    let mut options = String::new();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match word.to_str() {
            Some("-o") => {
                let more = words.next().and_then(|word| word.to_str()).ok_or_else(usage)?;
                options = [options.as_str(), more].join(",");
            }
            // The type of the file system, and a namespace.
            Some("-t" | "-N") => drop(words.next().ok_or_else(usage)?),
            Some(flags) if flags.starts_with('-') && flags.len() > 1 => {
                for flag in flags.chars().skip(1) {
                    match flag {
                        's' => sloppy = true,
                        'f' => fake = true,
                        'v' => made.push("--verbose".into()),
                        'n' => {}
                        _ => return Err(usage()),
                    }
                }
            }
            _ => places.push(word.clone()),
        }
    }
    let [device, target] = <[OsString; 2]>::try_from(places).map_err(|_| usage())?;
    add_options(&options, sloppy, &mut made)?;
    made.extend(["--".into(), device, target]);
    Ok((!fake).then_some(made))
}

fn add_options(options: &str, sloppy: bool, made: &mut Vec<OsString>) -> Result<(), String> {
    let mut write = true;
    for option in options.split(',').filter(|option| !option.is_empty()) {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        let known = WITH_VALUE.iter().find(|(known, _)| *known == name && !value.is_empty());
        match (name, known) {
            (_, Some((_, long))) => made.extend([OsString::from(*long), value.into()]),
            ("ro", _) => write = false,
            ("rw", _) => write = true,
            ("allow_other", _) => made.push("--allow-other".into()),
            ("filesystem", _) => made.push("--filesystem".into()),
            // Commas separate options: those of the file system have colons.
            ("filesystem-options", _) if !value.is_empty() => {
                made.extend(["--filesystem-options".into(), value.replace(':', ",").into()]);
            }
            _ if is_ignored(option) || sloppy => {}
            _ => {
                return Err(format!(
                    "option {option:?} is not known: use ro, rw, export=, layer=, partition=, filesystem, \
                     filesystem-options=, cache=, allow_other, timeout=, workers=, memory=, engine=, pid-file="
                ));
            }
        }
    }
    if write {
        made.push("--writable".into());
    }
    Ok(())
}

fn is_ignored(option: &str) -> bool {
    IGNORED.contains(&option) || IGNORED_PREFIXES.iter().any(|prefix| option.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translate(words: &[&str]) -> Result<Option<String>, String> {
        let words: Vec<_> = words.iter().map(OsString::from).collect();
        let join = |words: Vec<OsString>| {
            words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
        };
        translated(&words).map(|made| made.map(join))
    }

    #[test]
    fn lines_of_fstab_become_mounts() {
        let options = "rw,noauto,x-systemd.automount,layer=cow,partition=2,filesystem";
        assert_eq!(
            translate(&["disk.raw", "/mnt", "-o", options]),
            Ok(Some(
                "mount --in-background --layer cow --partition 2 --filesystem --writable -- disk.raw /mnt"
                    .into()
            ))
        );
        assert_eq!(
            translate(&["nbd://h/a", "/mnt", "-v", "-o", "ro,filesystem-options=noload:noatime"]),
            Ok(Some(
                "mount --in-background --verbose --filesystem-options noload,noatime -- nbd://h/a /mnt".into()
            ))
        );
        assert_eq!(
            translate(&["a.raw", "/mnt", "-o", "ro,export=a,export=b=b.raw"]),
            Ok(Some("mount --in-background --export a --export b=b.raw -- a.raw /mnt".into()))
        );
        assert_eq!(translate(&["-fn", "a", "b"]), Ok(None));
        assert!(translate(&["a", "b", "-s", "-o", "ro,other"]).is_ok());
    }

    #[test]
    fn what_is_not_known_is_refused() {
        for words in [
            &["a"][..],
            &["a", "b", "c"],
            &["a", "b", "-x"],
            &["a", "b", "-o"],
            &["a", "b", "-o", "other"],
            &["a", "b", "-o", "layer="],
            &["a", "b", "-o", "partition"],
        ] {
            assert!(translate(words).is_err(), "{words:?}");
        }
    }
}
