//! The command line of qemu-img: a command, its options and its operands.

use std::ffi::OsString;

use crate::ToolInvocation;
use crate::getopt;
use crate::qemu_image::QemuImage;
use crate::qemu_tls::CredentialsObject;

/// The version that is printed: scripts compare it to know which options exist.
pub const VERSION: &str = "10.0.13";

const HELP: &str = "\
Disk images, with the command line of QEMU's qemu-img. This is blockhaul.

    qemu-img COMMAND [OPTIONS] ...

    amend    [-f FORMAT] -o OPTIONS [-p] [-q] FILE
    bitmap   --add|--remove|--remove-all|--clear|--enable|--disable|--merge SOURCE [-b FILE]
             [-F FORMAT] [-g GRANULARITY] [-f FORMAT] FILE [BITMAP]
    check    [-f FORMAT] [--output=human|json] [-r leaks|all] [-q] [-U] FILE
    commit   [-f FORMAT] [-b BASE] [-d] [-p] [-q] FILE
    compare  [-f FORMAT] [-F FORMAT] [-s] [-p] [-q] [-U] FILE1 FILE2
    convert  [-f FORMAT] [-O FORMAT] [-o OPTIONS] [-B BACKING -F FORMAT] [-c] [-l SNAPSHOT] [-n]
             [-S SIZE] [-r RATE] [-m N] [-W] [-t CACHE] [-T CACHE] [--target-is-zero]
             [--bitmaps [--skip-broken-bitmaps]] [-p] [-q] [-U] FILE OUTPUT
    create   [-f FORMAT] [-o OPTIONS] [-b BACKING -F FORMAT] [-u] [-q] FILE [SIZE]
    dd       [-f FORMAT] [-O FORMAT] [-U] [bs=SIZE] [count=N] [skip=N] if=FILE of=OUTPUT
    info     [-f FORMAT] [--output=human|json] [--backing-chain] [--limits] [-t CACHE] [-U] FILE
    map      [-f FORMAT] [--output=human|json] [-s OFFSET] [-l LENGTH] [-U] FILE
    measure  [-f FORMAT] [--output=human|json] [-O FORMAT] [-o OPTIONS] [--size=SIZE | FILE]
    rebase   [-f FORMAT] [-b BACKING] [-B FORMAT] [-u] [-c] [-p] [-q] FILE
    resize   [-f FORMAT] [--preallocation=MODE] [--shrink] [-q] FILE [+|-]SIZE
    snapshot [-l | -c NAME | -a NAME | -d NAME] [-q] [-U] FILE

FILE is a path, an NBD URI, json:{...} or, with --image-opts, driver=...,file.filename=...
Formats: raw, qcow2; blockhaul help devices lists those that are read.

See docs/qemu-img.md for what differs.
";

/// A command line that was understood.
#[derive(Debug)]
pub struct QemuImgCommand {
    /// The name of the command.
    pub command: &'static str,
    options: Vec<(&'static str, String)>,
    credentials: Vec<CredentialsObject>,
    /// The words that are no options.
    pub operands: Vec<String>,
}

/// A command, its options, and those that are refused by name.
struct CommandSyntax {
    name: &'static str,
    /// As [`getopt::parse`] reads them.
    options: &'static str,
    refused: &'static [&'static str],
}

const COMMANDS: &[CommandSyntax] = &[
    CommandSyntax {
        name: "amend",
        options: "h|help f|format= image-opts object= o|options= t|cache= p|progress q|quiet \
                  force",
        refused: &[],
    },
    CommandSyntax {
        name: "bitmap",
        options: "h|help f|format= image-opts object= add remove remove-all clear enable disable merge= \
                  g|granularity= b|source-file= F|source-format=",
        refused: &[],
    },
    CommandSyntax {
        name: "check",
        options: "h|help f|format= image-opts output= object= r|repair= T|cache:source-cache= \
                  q|quiet U|force-share",
        refused: &[],
    },
    CommandSyntax {
        name: "commit",
        options: "h|help f|format= image-opts object= t|cache= b|base= d|drop r|rate-limit= \
                  p|progress q|quiet",
        refused: &["rate-limit"],
    },
    CommandSyntax {
        name: "compare",
        options: "h|help f|format= a-format:format= F|b-format= image-opts object= s|strict T|cache:source-cache= \
                  p|progress q|quiet U|force-share",
        refused: &[],
    },
    CommandSyntax {
        name: "convert",
        options: "h|help f|source-format= O|target-format= output-format:target-format= image-opts source-image-opts:image-opts target-image-opts \
                  object= o|options= target-format-options:options= target-options:options= B|backing= b|backing= F|backing-format= c|compress \
                  C|copy-range-offloading:copy-range l|snapshot= source-snapshot:snapshot= n|no-create S|sparse-size= r|rate-limit= \
                  m|parallel= W|oob-writes t|cache= target-cache:cache= T|source-cache= target-is-zero salvage \
                  bitmaps skip-broken-bitmaps p|progress q|quiet U|force-share",
        refused: &[],
    },
    CommandSyntax {
        name: "create",
        options: "u|backing-unsafe h|help f|format= o|options= object= b|backing= F|backing-format= B|backing-format= \
                  q|quiet",
        refused: &[],
    },
    CommandSyntax {
        name: "dd",
        options: "h|help f|format= O|target-format= output-format:target-format= image-opts object= U|force-share",
        refused: &[],
    },
    CommandSyntax {
        name: "info",
        options: "h|help f|format= image-opts output= object= b|backing-chain t|cache= limits \
                  U|force-share",
        refused: &[],
    },
    CommandSyntax {
        name: "map",
        options: "h|help f|format= image-opts output= object= s|start-offset= l|max-length= \
                  U|force-share",
        refused: &[],
    },
    CommandSyntax {
        name: "measure",
        options: "h|help f|format= O|target-format= image-opts image-options:image-opts output= object= o|options= \
                  s|size= l|snapshot= U|force-share",
        refused: &[],
    },
    CommandSyntax {
        name: "rebase",
        options: "u|backing-unsafe h|help f|format= image-opts object= b|backing= F|backing-format= B|backing-format= \
                  c|compress t|cache= T|backing-cache:source-cache= p|progress q|quiet \
                  U|force-share",
        refused: &[],
    },
    CommandSyntax {
        name: "resize",
        options: "h|help f|format= image-opts object= shrink preallocation= q|quiet",
        refused: &[],
    },
    CommandSyntax {
        name: "snapshot",
        options: "h|help f|format= image-opts object= l|list a|apply= c|create= d|delete= \
                  q|quiet U|force-share",
        refused: &[],
    },
];

/// The command of the original that is not here.
const MISSING: &str = "bench";

/// Parses the command line of qemu-img, without the name of the program.
///
/// # Errors
/// What is wrong, or not supported, by name.
pub fn parse(words: &[OsString]) -> Result<ToolInvocation<QemuImgCommand>, String> {
    let text = |word: &OsString| {
        word.to_str().map(str::to_string).ok_or_else(|| format!("{word:?} is not UTF-8"))
    };
    let words: Vec<String> = words.iter().map(text).collect::<Result<_, _>>()?;
    let (name, rest) = match &words[..] {
        [] => return Err("Not enough arguments\nTry 'qemu-img --help' for more info".to_string()),
        [first, ..] if ["-h", "--help", "-help"].contains(&first.as_str()) => {
            return Ok(ToolInvocation::Text(HELP.to_string()));
        }
        [first, ..] if ["-V", "--version"].contains(&first.as_str()) => {
            return Ok(ToolInvocation::Text(format!("qemu-img version {VERSION} (blockhaul)\n")));
        }
        [first, ..] if first.starts_with('-') => {
            return Err(format!("{first} is not supported; see qemu-img --help"));
        }
        [name, rest @ ..] => (name, rest),
    };
    if name == MISSING {
        return Err(format!("the command {name} is not supported; see qemu-img --help"));
    }
    let found = COMMANDS.iter().find(|one| one.name == name);
    let command = found
        .ok_or_else(|| format!("Command not found: {name}\nTry 'qemu-img --help' for more info"))?;
    let mut rest: Vec<OsString> = rest.iter().map(OsString::from).collect();
    // The last word of resize is the size, which may begin as an option does.
    let is_size = |word: &OsString| {
        let digits = word.to_str().and_then(|word| word.strip_prefix('-'));
        digits.is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
    };
    let size = if command.name == "resize" { rest.pop_if(|word| is_size(word)) } else { None };
    let parts = getopt::parse(command.options, &rest)
        .map_err(|error| format!("{name}: {error}; see qemu-img --help"))?;
    let mut line = QemuImgCommand {
        command: command.name,
        options: Vec::new(),
        credentials: Vec::new(),
        operands: Vec::new(),
    };
    for (means, value) in parts.options {
        match means {
            "help" => return Ok(ToolInvocation::Text(HELP.to_string())),
            "object" => {
                let text = value.unwrap_or_default().into_string();
                let text = text.map_err(|_| "--object: the value is not UTF-8".to_string())?;
                let object =
                    CredentialsObject::parse(&text).map_err(|why| format!("{name}: {why}"))?;
                line.credentials.push(object);
                continue;
            }
            _ if command.refused.contains(&means) => {
                return Err(format!("{name}: --{means} is not supported"));
            }
            _ => {}
        }
        let value = value.and_then(|value| value.into_string().ok()).unwrap_or_default();
        line.options.push((means, value));
    }
    let operands =
        parts.operands.into_iter().chain(size).filter_map(|word| word.into_string().ok());
    line.operands = operands.collect();
    Ok(ToolInvocation::Run(line))
}

impl QemuImgCommand {
    /// Whether an option was given.
    pub fn has(&self, name: &str) -> bool {
        self.options.iter().any(|one| one.0 == name)
    }

    /// The value of an option: the last one counts.
    pub fn value(&self, name: &str) -> Option<&str> {
        let found = self.options.iter().rev().find(|one| one.0 == name);
        found.map(|one| one.1.as_str())
    }

    /// All options, in order.
    pub fn options(&self) -> &[(&'static str, String)] {
        &self.options
    }

    /// Whether JSON is asked for.
    ///
    /// # Errors
    /// For an output that is not known.
    pub fn is_json(&self) -> Result<bool, String> {
        match self.value("output") {
            None | Some("human") => Ok(false),
            Some("json") => Ok(true),
            Some(_) => Err("--output expects 'human' or 'json'".to_string()),
        }
    }

    /// The image that an operand names, in the format of this option.
    ///
    /// # Errors
    /// If it is missing, or cannot be understood.
    pub fn image(&self, number: usize, format: &str) -> Result<QemuImage, String> {
        let Some(name) = self.operands.get(number) else {
            return Err(format!("{}: Expecting image file name", self.command));
        };
        if self.has("image-opts") {
            return QemuImage::options_with(name, &self.credentials);
        }
        QemuImage::named(name, self.value(format))
    }

    /// Refuses operands beyond the first `most`.
    ///
    /// # Errors
    /// Names the first one that is too many.
    pub fn at_most(&self, most: usize) -> Result<(), String> {
        match self.operands.get(most) {
            None => Ok(()),
            Some(word) => Err(format!("{}: Unexpected argument: {word}", self.command)),
        }
    }

    /// Whether an option `-o` asks for help.
    pub fn wants_help(&self) -> bool {
        let given = self.options.iter().filter(|one| one.0 == "options");
        let mut words = given.flat_map(|one| crate::qemu_storage_daemon::split(&one.1));
        words.any(|word| word == "help" || word == "?")
    }

    /// The members of all options `-o`.
    ///
    /// # Errors
    /// If a list begins or ends with a comma.
    pub fn creation(&self) -> Result<Vec<(String, String)>, String> {
        let given = self.options.iter().filter(|one| one.0 == "options");
        // Two commas are one that belongs to a value.
        let is_open = |text: &str| {
            let commas = text.len() - text.trim_end_matches(',').len();
            text.starts_with(',') || commas % 2 == 1
        };
        if let Some((_, text)) = given.clone().find(|one| is_open(&one.1)) {
            return Err(format!("Invalid option list: {text}"));
        }
        let words = given.flat_map(|one| crate::qemu_storage_daemon::split(&one.1));
        let pair = |word: String| match word.split_once('=') {
            Some((name, value)) => Ok((name.to_string(), value.to_string())),
            None => Ok((word, "on".to_string())),
        };
        words.map(pair).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> Result<QemuImgCommand, String> {
        let words: Vec<OsString> = text.split_whitespace().map(OsString::from).collect();
        match parse(&words)? {
            ToolInvocation::Text(text) => Err(text),
            ToolInvocation::Run(line) => Ok(line),
        }
    }

    #[test]
    fn options_may_be_anywhere_and_the_last_one_counts() {
        let found = line("convert a -O qcow2 -pm16 b -O raw -o a=1,b -o c=2").unwrap();
        assert_eq!(found.operands, ["a", "b"]);
        assert_eq!(found.value("target-format"), Some("raw"));
        assert_eq!(found.value("parallel"), Some("16"));
        assert!(found.has("progress") && !found.has("quiet"));
        assert_eq!(line("resize -q a -5M").unwrap().operands, ["a", "-5M"]);
        let pairs = found.creation().unwrap();
        assert_eq!(pairs.len(), 3);
        assert!(!found.wants_help() && line("create -o a=b,,help,? x").unwrap().wants_help());
        assert!(!line("create -o a=b,,help x").unwrap().wants_help());
        for open in [",a=b", "a=b,", ",,"] {
            let said = line(&format!("create -o {open} x")).unwrap().creation().unwrap_err();
            assert!(said.contains("Invalid option list"), "{said}");
        }
        assert_eq!(pairs[1], ("b".to_string(), "on".to_string()));
    }

    #[test]
    fn spellings_of_other_versions_mean_the_same() {
        let found = line("rebase -b a -B raw --backing-cache none c").unwrap();
        assert_eq!(found.value("backing-format"), Some("raw"));
        let found =
            line("convert --source-image-opts --target-cache none --target-format-options a=1 b c");
        let found = found.unwrap();
        assert_eq!((found.has("image-opts"), found.value("cache")), (true, Some("none")));
        assert_eq!(found.creation().unwrap(), [("a".to_string(), "1".to_string())]);
        assert_eq!(line("compare --a-format raw a b").unwrap().value("format"), Some("raw"));
        assert!(line("info -b a").unwrap().has("backing-chain"));
    }

    #[test]
    fn what_is_missing_is_refused_by_name() {
        for (text, why) in [
            ("", "Not enough arguments"),
            ("foo", "Command not found: foo"),
            ("bench x", "the command bench is not supported"),
            ("info --object secret,id=x a", "--object secret is not supported"),
            ("info --what a", "--what"),
            ("--trace x", "--trace"),
        ] {
            let said = line(text).unwrap_err();
            assert!(said.contains(why), "{text}: {said}");
        }
        assert!(line("--version").unwrap_err().starts_with("qemu-img version 10."));
        assert!(line("info a --output=xml").unwrap().is_json().is_err());
        assert!(line("info a b").unwrap().at_most(1).is_err());
    }
}
