//! Where the scripts are: one file for all methods, or a file for each.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use blockhaul_block::{Error, Kind, Result};

use crate::folder::StateFolder;

/// Maximum length of a script on standard input.
const INLINE_MAX: u64 = 16 << 20;

/// Keys that nbdkit-eval-plugin(1) takes as scripts; other keys are parameters.
const METHODS: [&str; 33] = [
    "after_fork",
    "block_size",
    "cache",
    "can_cache",
    "can_extents",
    "can_fast_zero",
    "can_flush",
    "can_fua",
    "can_multi_conn",
    "can_trim",
    "can_write",
    "can_zero",
    "close",
    "config",
    "config_complete",
    "default_export",
    "dump_plugin",
    "export_description",
    "extents",
    "flush",
    "get_ready",
    "get_size",
    "is_rotational",
    "list_exports",
    "missing",
    "open",
    "pread",
    "preconnect",
    "pwrite",
    "thread_model",
    "trim",
    "unload",
    "zero",
];

/// Methods whose presence implies another method's answer, and the output of those: as nbdkit does
/// for plugins in C.
const IMPLIED: [(&str, &str, &str); 6] = [
    ("pwrite", "can_write", ""),
    ("flush", "can_flush", ""),
    ("trim", "can_trim", ""),
    ("zero", "can_zero", ""),
    ("extents", "can_extents", ""),
    ("cache", "can_cache", "native"),
];

/// The form of a script.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    /// One script for all methods, in any language (nbdkit-sh-plugin(1)).
    Sh,
    /// The shell's commands for each method (nbdkit-eval-plugin(1)).
    Eval,
}

impl Language {
    /// Its scheme, and its name in nbdkit.
    pub fn name(self) -> &'static str {
        match self {
            Language::Sh => "sh",
            Language::Eval => "eval",
        }
    }
}

/// The implementation of a method.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Script {
    /// A file to start.
    File(PathBuf),
    /// Nothing: the method succeeds and prints this.
    Says(&'static str),
    /// Nothing: the method is missing.
    Missing,
}

/// The scripts of a plugin.
pub(crate) enum ScriptSource {
    Sh { script: PathBuf },
    Eval { scripts: BTreeMap<String, Script> },
}

impl ScriptSource {
    /// A script by its path, or on standard input.
    pub(crate) fn sh(path: &str, folder: &StateFolder) -> Result<ScriptSource> {
        let script = match path {
            "-" => inline(folder)?,
            path => fs::canonicalize(path)
                .map_err(|error| Error::system(format!("cannot find the script {path}"), error))?,
        };
        Ok(ScriptSource::Sh { script })
    }

    /// No scripts yet.
    pub(crate) fn eval() -> ScriptSource {
        ScriptSource::Eval { scripts: BTreeMap::new() }
    }

    /// Whether a key of `eval` is a method.
    pub(crate) fn is_method(key: &str) -> bool {
        METHODS.contains(&key)
    }

    /// Adds the commands of a method.
    pub(crate) fn add(&mut self, method: &str, commands: &str, folder: &StateFolder) -> Result<()> {
        let ScriptSource::Eval { scripts } = self else { return Ok(()) };
        if scripts.contains_key(method) {
            let text = format!("eval: method {method} is given more than once");
            return Err(Error::new(Kind::Usage, text));
        }
        let path = folder.path().join(method);
        write(&path, commands.as_bytes())?;
        scripts.insert(method.into(), Script::File(path));
        Ok(())
    }

    /// Checks at the end that all required methods exist.
    pub(crate) fn complete(&mut self) -> Result<()> {
        let ScriptSource::Eval { scripts } = self else { return Ok(()) };
        if !scripts.contains_key("get_size") {
            return Err(Error::new(Kind::Usage, "eval: the method get_size= is required"));
        }
        for (method, ability, says) in IMPLIED {
            if scripts.contains_key(method) && !scripts.contains_key(ability) {
                scripts.insert(ability.into(), Script::Says(says));
            }
        }
        Ok(())
    }

    /// The implementation of a method.
    pub(crate) fn script(&self, method: &str) -> Script {
        match self {
            ScriptSource::Sh { script } => Script::File(script.clone()),
            ScriptSource::Eval { scripts } => {
                let found = scripts.get(method).or_else(|| scripts.get("missing"));
                found.cloned().unwrap_or(Script::Missing)
            }
        }
    }

    /// Its name in messages.
    pub(crate) fn shown(&self) -> String {
        match self {
            ScriptSource::Sh { script } => format!("sh:{}", script.display()),
            ScriptSource::Eval { .. } => "eval".into(),
        }
    }
}

/// Writes a script so that it can be executed.
fn write(path: &Path, commands: &[u8]) -> Result<()> {
    let cannot = |error| Error::system(format!("cannot write {}", path.display()), error);
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o500)
        .open(path)
        .map_err(cannot)?;
    file.write_all(commands).map_err(cannot)?;
    if commands.last().is_some_and(|&last| last != b'\n') {
        file.write_all(b"\n").map_err(cannot)?;
    }
    Ok(())
}

/// The script on standard input, stored as a file.
fn inline(folder: &StateFolder) -> Result<PathBuf> {
    let cannot = |error| Error::system("cannot read the script on standard input", error);
    let input = std::io::stdin();
    let socket = fs::metadata("/dev/stdin").is_ok_and(|found| found.file_type().is_socket());
    if socket {
        let text = "standard input is a connection, not a script: name a file";
        return Err(Error::new(Kind::Usage, text));
    }
    let mut script = Vec::new();
    input.lock().take(INLINE_MAX + 1).read_to_end(&mut script).map_err(cannot)?;
    if script.is_empty() {
        return Err(Error::new(Kind::Usage, "there is no script on standard input"));
    }
    if script.len() as u64 > INLINE_MAX {
        return Err(Error::new(Kind::Usage, "the script on standard input is too long"));
    }
    let path = folder.path().join("inline-script.sh");
    write(&path, &script)?;
    Ok(path)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_given_is_missing_or_implied() {
        let folder = StateFolder::new().unwrap();
        let mut source = ScriptSource::eval();
        source.add("pwrite", "cat", &folder).unwrap();
        assert!(source.complete().is_err(), "get_size is required");
        source.add("get_size", "echo 1M", &folder).unwrap();
        source.complete().unwrap();
        assert_eq!(source.script("can_write"), Script::Says(""));
        assert_eq!(source.script("can_trim"), Script::Missing);
        assert_eq!(source.script("unheard_of"), Script::Missing);
        let Script::File(path) = source.script("pwrite") else { panic!("it is a file") };
        assert_eq!(fs::read(path).unwrap(), b"cat\n");
        assert!(source.add("pwrite", "cat", &folder).is_err());
        let place = folder.path().to_path_buf();
        drop(folder);
        assert!(!place.exists());
    }

    #[test]
    fn missing_may_be_replaced() {
        let folder = StateFolder::new().unwrap();
        let mut source = ScriptSource::eval();
        source.add("missing", "exit 1", &folder).unwrap();
        assert_eq!(source.script("trim"), Script::File(folder.path().join("missing")));
        assert!(ScriptSource::is_method("missing") && !ScriptSource::is_method("load"));
    }
}
