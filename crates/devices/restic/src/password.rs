//! Passwords, from the places where restic looks for them.

use std::fmt;
use std::path::Path;
use std::process::{Command, Stdio};

use blockhaul_block::{Error, Kind, Result};

/// Longest password.
const PASSWORD_MAX: u64 = 64 << 10;

/// The place of a password.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum PasswordSource {
    /// A file with the password, and perhaps a byte order mark and white space around it.
    File(String),
    /// A command that prints the password, perhaps with white space around it.
    Command(String),
    /// The password.
    Text(String),
}

impl fmt::Debug for PasswordSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PasswordSource::File(file) => write!(f, "File({file:?})"),
            PasswordSource::Command(command) => write!(f, "Command({command:?})"),
            PasswordSource::Text(_) => f.write_str("Text"),
        }
    }
}

impl PasswordSource {
    /// The place that these options name, else the environment.
    ///
    /// # Errors
    /// [`Kind::Usage`]: none is named, or two at once.
    pub(crate) fn choose(
        file: Option<&str>,
        command: Option<&str>,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<PasswordSource> {
        if let Some(source) = PasswordSource::one(file, command)? {
            return Ok(source);
        }
        let named = |name: &str| variable(name).filter(|value| !value.is_empty());
        let (file, command) = (named("RESTIC_PASSWORD_FILE"), named("RESTIC_PASSWORD_COMMAND"));
        if let Some(source) = PasswordSource::one(file.as_deref(), command.as_deref())? {
            return Ok(source);
        }
        named("RESTIC_PASSWORD").map(PasswordSource::Text).ok_or_else(|| {
            let remedy = "add password-file=FILE or password-command=COMMAND, or set RESTIC_PASSWORD_FILE, \
                          RESTIC_PASSWORD_COMMAND or RESTIC_PASSWORD in the environment";
            Error::new(Kind::Usage, "restic: no password is named").with_remedy(remedy)
        })
    }

    fn one(file: Option<&str>, command: Option<&str>) -> Result<Option<PasswordSource>> {
        match (file, command) {
            (Some(_), Some(_)) => {
                let text = "restic: a file and a command for the password exclude each other";
                Err(Error::new(Kind::Usage, text).with_remedy("leave one of them out"))
            }
            (Some(file), None) => Ok(Some(PasswordSource::File(file.to_owned()))),
            (None, command) => {
                Ok(command.map(|command| PasswordSource::Command(command.to_owned())))
            }
        }
    }

    /// The password. Blocks.
    ///
    /// # Errors
    /// The file cannot be read, or the command fails.
    pub(crate) fn read(&self) -> Result<Vec<u8>> {
        match self {
            PasswordSource::Text(password) => Ok(password.clone().into_bytes()),
            PasswordSource::File(file) => {
                let read = blockhaul_io::read_regular_file(Path::new(file), PASSWORD_MAX);
                let wrong =
                    |error| Error::system(format!("cannot read the password in {file}"), error);
                Ok(trimmed(&decoded(read.map_err(wrong)?)))
            }
            PasswordSource::Command(command) => run(command),
        }
    }
}

/// The text of a file in UTF-8: a byte order mark at its beginning names the encoding.
fn decoded(text: Vec<u8>) -> Vec<u8> {
    let wide = |text: &[u8], unit: fn([u8; 2]) -> u16| {
        let units = text.as_chunks::<2>().0.iter().map(|pair| unit(*pair));
        char::decode_utf16(units).map(|letter| letter.unwrap_or('\u{fffd}')).collect::<String>()
    };
    match text[..] {
        [0xef, 0xbb, 0xbf, ref text @ ..] => text.to_owned(),
        [0xff, 0xfe, ref text @ ..] => wide(text, u16::from_le_bytes).into_bytes(),
        [0xfe, 0xff, ref text @ ..] => wide(text, u16::from_be_bytes).into_bytes(),
        _ => text,
    }
}

/// The text without white space around it, as restic takes passwords.
fn trimmed(text: &[u8]) -> Vec<u8> {
    match std::str::from_utf8(text) {
        Ok(text) => text.trim().as_bytes().to_owned(),
        Err(_) => text.trim_ascii().to_owned(),
    }
}

/// Runs a command without a shell, as restic does, and returns the password that it prints.
fn run(line: &str) -> Result<Vec<u8>> {
    let wrong = |why: String| {
        let text = format!("the command for the password, {line:?}, {why}");
        let remedy = "name a command that prints the password and ends with status 0";
        Error::new(Kind::Usage, text).with_remedy(remedy)
    };
    let words = words(line).ok_or_else(|| wrong("has a quote without an end".into()))?;
    let Some((program, arguments)) = words.split_first() else {
        return Err(wrong("is empty".into()));
    };
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stderr(Stdio::inherit());
    let output = command.output().map_err(|error| wrong(format!("cannot be run: {error}")))?;
    if !output.status.success() {
        return Err(wrong(format!("failed: {}", output.status)));
    }
    Ok(trimmed(&output.stdout))
}

/// The words of a command line with quotes. None: a quote has no end.
fn words(line: &str) -> Option<Vec<String>> {
    let mut words = Vec::new();
    let (mut word, mut quote) = (None::<String>, None);
    let mut letters = line.chars();
    while let Some(letter) = letters.next() {
        match (quote, letter) {
            (Some(open), letter) if letter == open => quote = None,
            (None | Some('"'), '\\') => word.get_or_insert_default().push(letters.next()?),
            (None, '\'' | '"') => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (None, letter) if letter.is_whitespace() => words.extend(word.take()),
            (_, letter) => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    quote.is_none().then_some(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_come_before_the_environment_and_files_before_the_password() {
        let all = |name: &str| Some(name.to_lowercase());
        let choose = |file, command, variable: &dyn Fn(&str) -> Option<String>| {
            PasswordSource::choose(file, command, variable)
        };
        assert_eq!(choose(Some("a"), None, &all).unwrap(), PasswordSource::File("a".into()));
        assert_eq!(choose(None, Some("a"), &all).unwrap(), PasswordSource::Command("a".into()));
        let only = |only: &'static str| move |name: &str| (name == only).then(|| "x".to_owned());
        let file = only("RESTIC_PASSWORD_FILE");
        assert_eq!(choose(None, None, &file).unwrap(), PasswordSource::File("x".into()));
        let text = only("RESTIC_PASSWORD");
        assert_eq!(choose(None, None, &text).unwrap(), PasswordSource::Text("x".into()));
        for (file, variables) in
            [(Some("a"), &(|_: &str| None) as &dyn Fn(&str) -> _), (None, &all)]
        {
            assert_eq!(choose(file, file, variables).unwrap_err().kind(), Kind::Usage);
        }
        assert!(choose(None, None, &|_| Some(String::new())).unwrap_err().remedy().is_some());
    }

    #[test]
    fn files_and_commands_are_read_without_white_space_around() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a b");
        std::fs::write(&path, " pass word\n\n").unwrap();
        let path = path.to_str().unwrap();
        assert_eq!(PasswordSource::File(path.into()).read().unwrap(), b"pass word");
        let command = |line: &str| PasswordSource::Command(line.into()).read();
        assert_eq!(command(&format!("cat '{path}'")).unwrap(), b"pass word");
        assert_eq!(command("printf %s \"a b\"\\ c").unwrap(), b"a b c");
        for bad in ["", "'", "false", "/nonexistent/command"] {
            assert_eq!(command(bad).unwrap_err().kind(), Kind::Usage, "{bad}");
        }
        assert!(PasswordSource::File("/nonexistent".into()).read().is_err());
        let wide =
            |unit: fn(u16) -> [u8; 2]| "\u{feff}pä\r\n".encode_utf16().flat_map(unit).collect();
        for bytes in
            ["\u{feff}pä\n".as_bytes().to_vec(), wide(u16::to_le_bytes), wide(u16::to_be_bytes)]
        {
            std::fs::write(path, bytes).unwrap();
            assert_eq!(PasswordSource::File(path.into()).read().unwrap(), "pä".as_bytes());
        }
        assert!(!format!("{:?}", PasswordSource::Text("secret".into())).contains("secret"));
    }

    #[test]
    fn words_have_quotes() {
        let same = |line: &str, expected: &[&str]| assert_eq!(words(line).unwrap(), expected);
        same(" a  b ", &["a", "b"]);
        same("a'b c'd \"e\\\"f\" '' g\\ h", &["ab cd", "e\"f", "", "g h"]);
        same("'a\\b'", &["a\\b"]);
        assert_eq!((words("'a"), words("a\\")), (None, None));
    }
}
