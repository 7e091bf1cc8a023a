//! Parameters in files: `@PATH` stands for the lines of a file.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use super::line::{PluginParameter, parameter};

/// Maximum depth of files that name files.
const DEPTH_MAX: usize = 16;
/// Maximum size of a file in bytes.
const SIZE_MAX: u64 = 16 << 20;
/// Maximum number of parameters of a command line that names files.
const PARAMETERS_MAX: usize = 1 << 20;

/// Adds the parameter in a word, or those in the file that the word names.
pub fn expand(word: &str, parameters: &mut Vec<PluginParameter>) -> Result<(), String> {
    expand_in(word, Path::new(""), DEPTH_MAX, parameters)
}

/// The same for a word of a file in `folder`.
fn expand_in(
    word: &str,
    folder: &Path,
    depth: usize,
    parameters: &mut Vec<PluginParameter>,
) -> Result<(), String> {
    // Without a slash it is a parameter of some plugins, such as an offset of `data`.
    let Some(path) = word.strip_prefix('@').filter(|path| path.contains('/')) else {
        parameters.push(parameter(word));
        return Ok(());
    };
    let path = folder.join(path);
    let shown = path.display();
    let depth =
        depth.checked_sub(1).ok_or_else(|| format!("{shown}: files name files too often"))?;
    let text = read(&path)?;
    let folder = path.parent().map(PathBuf::from).unwrap_or_default();
    let lines = text.lines().filter(|line| !is_comment(line));
    for line in lines {
        if parameters.len() >= PARAMETERS_MAX {
            return Err(format!("{shown}: more than {PARAMETERS_MAX} parameters"));
        }
        expand_in(line, &folder, depth, parameters)?;
    }
    Ok(())
}

/// Whether a line of a file is blank or a comment. White space before a parameter is part of the parameter, as in
/// nbdkit.
fn is_comment(line: &str) -> bool {
    let text = line.trim_ascii_start();
    text.is_empty() || text.starts_with('#')
}

fn read(path: &Path) -> Result<String, String> {
    let failed =
        |error: std::io::Error| format!("{}: {}", path.display(), blockhaul_io::plain(&error));
    let file = std::fs::File::open(path).map_err(failed)?;
    let mut text = String::new();
    file.take(SIZE_MAX + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > SIZE_MAX {
        return Err(format!("{}: a file of parameters has at most 16 MiB", path.display()));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(word: &str) -> Result<Vec<PluginParameter>, String> {
        let mut parameters = Vec::new();
        expand(word, &mut parameters).map(|()| parameters)
    }

    fn bare(text: &str) -> PluginParameter {
        (None, text.into())
    }

    #[test]
    fn files_have_a_parameter_on_each_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let word = |name: &str| format!("@{}", path(name).display());
        std::fs::create_dir(path("sub")).unwrap();
        std::fs::write(path("a"), "# a comment\n\n \t\n  # b\nfile=one two\n@./sub/b\nbare\n@1M\n")
            .unwrap();
        std::fs::write(path("sub/b"), "k=v\r\n@./c").unwrap();
        std::fs::write(path("sub/c"), "@./c").unwrap();
        assert!(expanded(&word("a")).unwrap_err().contains("too often"));
        std::fs::write(path("sub/c"), "last").unwrap();
        let key = |key: &str, value: &str| (Some(key.to_string()), value.to_string());
        let wanted =
            [key("file", "one two"), key("k", "v"), bare("last"), bare("bare"), bare("@1M")];
        assert_eq!(expanded(&word("a")).unwrap(), wanted);
        assert_eq!(expanded("@1M").unwrap(), [bare("@1M")]);
        assert!(expanded(&word("none")).unwrap_err().contains("none"));
        std::fs::write(path("bytes"), [0xff, b'\n']).unwrap();
        assert!(expanded(&word("bytes")).is_err());
        // Does not end, and is not read to its end.
        assert!(expanded("@/dev/zero").is_err());
    }
}
