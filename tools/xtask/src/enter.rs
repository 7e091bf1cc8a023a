//! Runs a peer program in its own mount namespace in which the unpacked `/usr` is mounted over the
//! machine's, so that paths compiled into the programs work while `/tmp`, `/dev/shm`, sockets and
//! the work tree are shared. Every step is an exec: process ID, descriptors (also those of socket
//! activation, whose LISTEN_PID must stay correct), signals and exit status are preserved.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use crate::run;

/// A marker in the unpacked `/usr`: a program that sees it is already inside.
pub const MARK: &str = ".blockhaul-peers";

/// The flags with which `unshare` may make the namespace here, for root and for others.
/// Root may lack the capability to mount (containers) and still have user namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnshareFlags {
    root: &'static str,
}

impl UnshareFlags {
    /// Finds out what this machine permits.
    pub fn probe() -> Result<UnshareFlags, String> {
        let mut said = String::new();
        for flags in ["-m", "-rm"] {
            let mut command = Command::new("unshare");
            command.args([flags, "mount", "-n", "--bind", "/usr", "/usr"]);
            match run::quiet(&mut command) {
                // Others than root get here by -rm only, and root's flags do not matter to them;
                // a tree that is shared with root should still serve root the usual way.
                Ok(_) if flags == "-rm" && !is_root() => return Ok(UnshareFlags { root: "-m" }),
                Ok(_) => return Ok(UnshareFlags { root: flags }),
                Err(why) => said = why,
            }
        }
        Err(format!(
            "this machine refuses mount namespaces, in which the peers run ({said}). Run as root, \
             or allow user namespaces: sysctl user.max_user_namespaces above 0, and where the \
             kernel has them kernel.unprivileged_userns_clone=1 and \
             kernel.apparmor_restrict_unprivileged_userns=0; in a container, add the capability \
             SYS_ADMIN and a seccomp profile that permits mount and unshare"
        ))
    }

    /// Writes `enter` and one wrapper in `bin` for each program.
    pub fn write_scripts(self, peers: &Path, programs: &[String]) -> Result<(), String> {
        let keep = kept_directory(peers)?;
        let bin = peers.join("bin");
        fs::create_dir_all(&bin)
            .map_err(|error| format!("cannot make {}: {error}", bin.display()))?;
        script(&peers.join("enter"), &self.text("${0%/*}", None, keep.as_deref()))?;
        for program in programs {
            let name = Path::new(program).file_name().unwrap_or_default();
            let text = self.text("${0%/*}/..", Some(program), keep.as_deref());
            script(&bin.join(name), &text)?;
        }
        Ok(())
    }

    /// Text of a script. `peers` is target/peers as seen from the script, `program` the absolute
    /// path of what it runs (none: from the script's arguments), `keep` a directory under `/usr`
    /// that remains the machine's.
    fn text(self, peers: &str, program: Option<&str>, keep: Option<&str>) -> String {
        let what = program.unwrap_or("the command in the arguments");
        let argv = program.map_or(String::from("\"$@\""), |program| format!("{program} \"$@\""));
        let root_flags = self.root;
        // The peers do not use Cargo's libraries; a command that is run by `enter` may need them.
        let unset = if program.is_some() { "unset LD_LIBRARY_PATH\n" } else { "" };
        let keep = keep.map_or(String::new(), |dir| {
            format!(
                "mkdir -p \"$0{}\" && mount -n --rbind {dir} \"$0{}\" && ",
                &dir[4..],
                &dir[4..]
            )
        });
        // Read-only sources of a bind mount keep their submounts hidden without --rbind.
        let bind = if keep.is_empty() { "--bind" } else { "--rbind" };
        format!(
            "#!/bin/sh\n\
             # Written by `cargo xtask peers`: runs {what} among the peers.\n\
             {unset}export PATH=\"/usr/sbin:/usr/bin:/sbin:/bin${{PATH:+:$PATH}}\"\n\
             if [ -e /usr/{MARK} ]; then exec {argv}; fi\n\
             if [ -O / ]; then flags={root_flags}; else flags=-rm; fi\n\
             exec unshare $flags /bin/sh -c \
             '{keep}mount -n {bind} \"$0\" /usr || exit 125; exec \"$@\"' \
             \"{peers}/root/usr\" {argv}\n"
        )
    }
}

/// The directory directly under `/usr` that holds the work tree, where it is there at all: it must
/// stay visible.
fn kept_directory(peers: &Path) -> Result<Option<String>, String> {
    let Ok(under) = peers.strip_prefix("/usr") else { return Ok(None) };
    let first = under.iter().next().unwrap_or_default().to_string_lossy().into_owned();
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if ["bin", "sbin", "lib", "lib64", "share", "libexec"].contains(&first.as_str())
        || !first.chars().all(plain)
    {
        return Err(format!("peers cannot be unpacked below /usr/{first}; move the work tree"));
    }
    Ok(Some(format!("/usr/{first}")))
}

pub fn is_root() -> bool {
    run::quiet(Command::new("id").arg("-u")).is_ok_and(|id| id.trim() == "0")
}

fn script(path: &Path, text: &str) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("cannot write {}: {error}", path.display());
    fs::write(path, text).map_err(failed)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_exec_at_every_step() {
        let text = UnshareFlags { root: "-m" }.text("${0%/*}/..", Some("/usr/bin/nbdkit"), None);
        assert!(text.contains("then exec /usr/bin/nbdkit \"$@\"; fi"), "{text}");
        assert!(text.ends_with("\"${0%/*}/../root/usr\" /usr/bin/nbdkit \"$@\"\n"), "{text}");
        assert!(!text.contains("rbind"));
    }

    #[test]
    fn a_work_tree_below_usr_stays_visible() {
        let kept = kept_directory(Path::new("/usr/src/tree/target/peers"));
        assert_eq!(kept, Ok(Some("/usr/src".into())));
        assert_eq!(kept_directory(Path::new("/home/a/target/peers")), Ok(None));
        assert!(kept_directory(Path::new("/usr/lib/tree/target/peers")).is_err());
        let text = UnshareFlags { root: "-m" }.text("x", None, Some("/usr/src"));
        assert!(
            text.contains("mount -n --rbind /usr/src \"$0/src\" && mount -n --rbind"),
            "{text}"
        );
    }
}
