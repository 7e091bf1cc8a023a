//! Job files: several disks and how to copy each, in TOML. Keys are the long option names of
//! `blockhaul copy`, so that each option has only one definition. Files of `blockhaul pull` have further
//! keys ([`PULL`]).

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsString;
use std::fmt::Display;
use std::path::Path;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::args::{self, Given};
use crate::brackets::{self, Groups};
use crate::exit::{self, Failure, plain};

/// Options that apply to all disks together.
const COMMON: &[&str] = &[
    "parallel",
    "total-memory",
    "total-connections",
    "rate",
    "rate-file",
    "iops",
    "threads",
    "engine",
    "no-zero-copy",
    "metrics",
    "page",
];
/// The same, for the command line only.
const SPOKEN: &[&str] = &["job", "progress", "no-progress", "verbose", "help"];

/// Kinds of job files.
pub struct Shape {
    /// Keys of a disk that must be there, besides its source: devices.
    sides: &'static [&'static str],
    /// Further keys of a disk with a text.
    texts: &'static [&'static str],
    /// Further keys of a disk that are true or false.
    flags: &'static [&'static str],
    /// Options that have no meaning here.
    refused: &'static [&'static str],
    /// The command, for messages.
    command: &'static str,
}

/// Files of `blockhaul copy --job`.
const COPY: Shape =
    Shape { sides: &["source", "target"], texts: &[], flags: &[], refused: &[], command: "copy" };

/// Files of `blockhaul pull`: the target of a disk is a file of its store.
const PULL: Shape = Shape {
    sides: &["source"],
    texts: &["store", "bitmap", "parent", "point", "checkpoint", "mode"],
    flags: &["digests"],
    refused: &[
        "journal",
        "restart",
        "manifest",
        "since",
        "range",
        "ranges",
        "ranges-command",
        "ranges-partial",
        "bitmap-flags",
        "digest",
        "destination-is-zero",
        "trust",
        "target-layer",
        "zero-all",
    ],
    command: "pull",
};

/// Longer files cannot be job files.
const LONGEST: u64 = 1 << 20;
/// Maximum number of disks: all are open from the beginning.
const DISKS_MAX: usize = 1000;

/// The contents of a job file, combined with the command line.
pub struct JobFile {
    /// Options for all disks together.
    pub common: args::CopyArgs,
    /// The disks, in the file's order.
    pub disks: Vec<Disk>,
}

/// A disk of the file.
pub struct Disk {
    /// Its name, or number.
    pub name: String,
    /// Its position in the file, for messages.
    pub place: String,
    /// How to copy it.
    pub args: args::CopyArgs,
    /// Its `[ CMD … ]`.
    pub groups: Groups,
    /// Keys that are not options of `copy`, as text.
    pub keys: BTreeMap<String, String>,
}

/// Reads a job file; options on the command line take precedence.
pub fn read(path: &Path, given: &[Given]) -> Result<JobFile, Failure> {
    read_shaped(&COPY, path, given)
}

/// Reads a file of `blockhaul pull`. The target and the journal of each disk are yet to be set.
pub fn read_pull(path: &Path) -> Result<JobFile, Failure> {
    read_shaped(&PULL, path, &[])
}

fn read_shaped(shape: &'static Shape, path: &Path, given: &[Given]) -> Result<JobFile, Failure> {
    let unusable = |error: std::io::Error| {
        let text = format!("cannot read the job file {}: {}", path.display(), plain(&error));
        Failure::new(exit::OPEN, text)
    };
    let mut text = String::new();
    let mut file = std::io::Read::take(std::fs::File::open(path).map_err(unusable)?, LONGEST + 1);
    std::io::Read::read_to_string(&mut file, &mut text).map_err(unusable)?;
    if text.len() as u64 > LONGEST {
        let text = format!("the job file {} is longer than {LONGEST} bytes", path.display());
        return Err(Failure::usage(text));
    }
    parse_shaped(shape, &path.display().to_string(), &text, given)
}

#[cfg(any(test, fuzzing))]
pub fn parse(path: &str, text: &str, given: &[Given]) -> Result<JobFile, Failure> {
    parse_shaped(&COPY, path, text, given)
}

/// Parses a file of `blockhaul pull`.
#[cfg(any(test, fuzzing))]
pub fn parse_pull(path: &str, text: &str) -> Result<JobFile, Failure> {
    parse_shaped(&PULL, path, text, &[])
}

fn parse_shaped(
    shape: &'static Shape,
    path: &str,
    text: &str,
    given: &[Given],
) -> Result<JobFile, Failure> {
    let reader = Reader { shape, path, text, copy: args::definition_of::<args::CopyArgs>("copy") };
    let parsed = DeTable::parse(text);
    let table = parsed.map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        reader.wrong(at, error.message())
    })?;
    let mut common = Vec::new();
    let mut defaults = Defaults::default();
    let mut disks = None;
    for (key, value) in table.get_ref() {
        match (key.get_ref().as_ref(), value.get_ref()) {
            ("defaults", DeValue::Table(table)) => {
                let options = reader.options(table, &[])?;
                defaults = Defaults { options, keys: reader.keys(table)? };
            }
            ("disk", DeValue::Array(list)) => disks = Some((key.span().start, list)),
            ("defaults", _) => return Err(reader.wrong(key.span().start, "write it as [defaults]")),
            ("disk", _) => return Err(reader.wrong(key.span().start, "write it as [[disk]]")),
            _ => common.push(reader.option(key, value, true)?),
        }
    }
    let Some((_, list)) = disks.filter(|(_, list)| !list.is_empty()) else {
        let other = shape.sides.get(1).unwrap_or(&"store");
        let text = format!("it lists no disk: add [[disk]] with source = … and {other} = …");
        return Err(reader.wrong(0, text));
    };
    if list.len() > DISKS_MAX {
        return Err(reader.wrong(0, format!("it lists more than {DISKS_MAX} disks")));
    }
    let (spoken, given): (Vec<_>, Vec<_>) = given.iter().partition(|given| {
        COMMON.contains(&given.name.as_str()) || SPOKEN.contains(&given.name.as_str())
    });
    let rates = ["rate", "rate-file"];
    let limited = spoken.iter().any(|given| rates.contains(&given.name.as_str()));
    common.retain(|option| {
        let name = option.given.name.as_str();
        let said = spoken.iter().any(|given| given.name == name);
        !said && (!limited || !rates.contains(&name))
    });
    let spoken: Vec<_> = spoken.into_iter().cloned().collect();
    let mut words: Vec<OsString> = spoken.iter().flat_map(spelled).collect();
    words.extend(common.iter().flat_map(|option| spelled(&option.given)));
    if !spoken.iter().any(|given| given.name == "job") {
        words.push(format!("--job={path}").into());
    }
    let (common, _) = reader.understand(words, &common, 0, "")?;
    let mut names = HashSet::new();
    let mut made = Vec::new();
    for (number, disk) in (1_usize..).zip(list.iter()) {
        let disk = reader.disk(number, disk, &defaults, &given)?;
        if !names.insert(disk.name.clone()) {
            let text = format!("{}: another disk also has the name {:?}", disk.place, disk.name);
            return Err(Failure::usage(text));
        }
        made.push(disk);
    }
    Ok(JobFile { common, disks: made })
}

/// An option as words of a command line.
fn spelled(given: &Given) -> Vec<OsString> {
    let name = format!("--{}", given.name);
    if given.values.is_empty() {
        return vec![name.into()];
    }
    let word = |value: &OsString| {
        let mut word = OsString::from(format!("{name}="));
        word.push(value);
        word
    };
    given.values.iter().map(word).collect()
}

/// An option in the file.
#[derive(Debug, Clone)]
struct Keyed {
    given: Given,
    /// The offset of its key in the file.
    at: usize,
    /// A flag that is false: only overrides a true default.
    off: bool,
}

/// The table `[defaults]`.
#[derive(Default)]
struct Defaults {
    options: Vec<Keyed>,
    keys: BTreeMap<String, String>,
}

struct Reader<'a> {
    shape: &'static Shape,
    path: &'a str,
    text: &'a str,
    copy: clap::Command,
}

impl Reader<'_> {
    /// The position of byte `at` in the file, for users.
    fn place(&self, at: usize) -> String {
        let before = &self.text.as_bytes()[..at.min(self.text.len())];
        let line = 1 + before.iter().filter(|&&byte| byte == b'\n').count();
        format!("{}:{line}", self.path)
    }

    fn wrong(&self, at: usize, why: impl Display) -> Failure {
        Failure::usage(format!("{}: {why}", self.place(at)))
    }

    /// The options of a table, except the keys in `others` and those of the shape.
    fn options(&self, table: &DeTable<'_>, others: &[&str]) -> Result<Vec<Keyed>, Failure> {
        let Shape { texts, flags, .. } = self.shape;
        let own = table.iter().filter(|(key, _)| {
            let key = key.get_ref().as_ref();
            ![others, texts, flags].iter().any(|keys| keys.contains(&key))
        });
        own.map(|(key, value)| self.option(key, value, false)).collect()
    }

    /// The keys of the shape in a table.
    fn keys(&self, table: &DeTable<'_>) -> Result<BTreeMap<String, String>, Failure> {
        let mut keys = BTreeMap::new();
        for (key, value) in table {
            let name = key.get_ref().as_ref();
            let at = key.span().start;
            let text = if self.shape.texts.contains(&name) {
                let text = value.get_ref().as_str().map(str::to_string);
                text.ok_or_else(|| self.wrong(at, format!("key {name} must be a string")))?
            } else if self.shape.flags.contains(&name) {
                let on = value.get_ref().as_bool();
                let wrong = || self.wrong(at, format!("key {name} must be true or false"));
                on.ok_or_else(wrong)?.to_string()
            } else {
                continue;
            };
            keys.insert(name.to_string(), text);
        }
        Ok(keys)
    }

    fn option(
        &self,
        key: &Spanned<std::borrow::Cow<'_, str>>,
        value: &Spanned<DeValue<'_>>,
        common: bool,
    ) -> Result<Keyed, Failure> {
        let name = key.get_ref().as_ref();
        let at = key.span().start;
        let option = self.copy.get_arguments().find(|option| option.get_long() == Some(name));
        let refused = SPOKEN.contains(&name) || self.shape.refused.contains(&name);
        let Some(option) = option.filter(|_| !refused) else {
            let text = match (SPOKEN.contains(&name), refused) {
                (true, _) => format!("key {name}: only allowed on the command line"),
                (_, true) => format!("key {name}: not for blockhaul {}", self.shape.command),
                _ => {
                    let options = self.copy.get_arguments();
                    let near =
                        blockhaul_catalog::nearest(name, options.filter_map(|one| one.get_long()));
                    let near =
                        near.map(|near| format!("did you mean {near}? ")).unwrap_or_default();
                    format!("unknown key {name}; {near}keys are the long options of blockhaul copy")
                }
            };
            return Err(self.wrong(at, text));
        };
        match (common, COMMON.contains(&name)) {
            (true, false) => {
                let text = format!(
                    "key {name} applies to a disk: write it under its [[disk]], or under [defaults]"
                );
                return Err(self.wrong(at, text));
            }
            (false, true) => {
                let text = format!(
                    "key {name} applies to all disks together: write it before the first table"
                );
                return Err(self.wrong(at, text));
            }
            _ => {}
        }
        let takes_values = option.get_action().takes_values();
        let (values, off) = match (value.get_ref(), takes_values) {
            (DeValue::Boolean(on), false) => (Vec::new(), !on),
            (_, false) => {
                return Err(self.wrong(at, format!("key {name} must be true or false")));
            }
            (DeValue::Array(list), true) => {
                let values: Option<Vec<_>> =
                    list.iter().map(|value| word(value.get_ref())).collect();
                (values.filter(|values| !values.is_empty()).unwrap_or_default(), false)
            }
            (value, true) => (word(value).into_iter().collect(), false),
        };
        if takes_values && values.is_empty() {
            return Err(self.wrong(at, format!("key {name} must be a string or a number")));
        }
        Ok(Keyed { given: Given { name: name.to_string(), values }, at, off })
    }

    fn disk(
        &self,
        number: usize,
        disk: &Spanned<DeValue<'_>>,
        defaults: &Defaults,
        given: &[&Given],
    ) -> Result<Disk, Failure> {
        let DeValue::Table(table) = disk.get_ref() else {
            return Err(self.wrong(disk.span().start, "write it as [[disk]]"));
        };
        let at = table.iter().map(|(key, _)| key.span().start).min();
        let at = at.unwrap_or(disk.span().start);
        let own = |key: &str| table.iter().find(|(found, _)| found.get_ref().as_ref() == key);
        let name = match own("name") {
            None => number.to_string(),
            Some((key, value)) => {
                let name = value.get_ref().as_str().filter(|name| !name.is_empty());
                let wrong = || self.wrong(key.span().start, "key name must be a string");
                name.ok_or_else(wrong)?.to_string()
            }
        };
        let mut options = self.options(table, &[&["name"], self.shape.sides].concat())?;
        let mut keys = defaults.keys.clone();
        keys.extend(self.keys(table)?);
        let own_names: Vec<_> = options.iter().map(|option| option.given.name.clone()).collect();
        let other =
            defaults.options.iter().filter(|option| !own_names.contains(&option.given.name));
        options.extend(other.cloned());
        options.retain(|option| {
            !option.off && !given.iter().any(|given| given.name == option.given.name)
        });
        let mut words: Vec<OsString> = given.iter().flat_map(|given| spelled(given)).collect();
        words.extend(options.iter().flat_map(|option| spelled(&option.given)));
        words.push("--".into());
        for role in self.shape.sides {
            let Some((key, value)) = own(role) else {
                return Err(self.wrong(at, format!("disk {name} has no {role}")));
            };
            let wrong = || {
                let text =
                    format!("key {role} must be a device, or a list of words that start a server");
                self.wrong(key.span().start, text)
            };
            match value.get_ref() {
                DeValue::String(device) if device == "-" => {
                    let text = format!("key {role}: a job cannot use pipes");
                    return Err(self.wrong(key.span().start, text));
                }
                DeValue::String(device) => words.push(device.as_ref().into()),
                DeValue::Array(list) => {
                    let server: Option<Vec<_>> =
                        list.iter().map(|value| word(value.get_ref())).collect();
                    words.push("[".into());
                    words.extend(server.ok_or_else(wrong)?);
                    words.push("]".into());
                }
                _ => return Err(wrong()),
            }
        }
        if self.shape.sides.len() == 1 {
            // Both are set later; the parser wants them.
            words.push("null:".into());
            words.insert(0, "--journal=later".into());
        }
        let (args, groups) = self.understand(words, &options, at, &format!("disk {name}: "))?;
        Ok(Disk { name, place: self.place(at), args, groups, keys })
    }

    /// Parses words of a command line. Errors name the key with the invalid value.
    fn understand(
        &self,
        words: Vec<OsString>,
        options: &[Keyed],
        at: usize,
        whose: &str,
    ) -> Result<(args::CopyArgs, Groups), Failure> {
        let (words, groups) =
            brackets::take(words).map_err(|why| self.wrong(at, format!("{whose}{why}")))?;
        let error = match args::parse_command::<args::CopyArgs>("copy", words) {
            Ok((copy, _)) => return Ok((copy, groups)),
            Err(error) => error,
        };
        let about = error.get(clap::error::ContextKind::InvalidArg).map(ToString::to_string);
        let names = |option: &&Keyed| {
            let name = format!("--{}", option.given.name);
            about.as_ref().is_some_and(|about| about.split([' ', '=']).next() == Some(&name))
        };
        let found = options.iter().find(names);
        let rendered = error.to_string();
        let text = rendered.lines().take_while(|line| !line.trim().is_empty());
        let text = text.map(str::trim).collect::<Vec<_>>().join(" ");
        let text = text.strip_prefix("error: ").unwrap_or(&text);
        let key = found.map(|option| format!("key {}: ", option.given.name)).unwrap_or_default();
        Err(self.wrong(found.map_or(at, |option| option.at), format!("{whose}{key}{text}")))
    }
}

/// A value of the file as a word of a command line.
fn word(value: &DeValue<'_>) -> Option<OsString> {
    match value {
        DeValue::String(text) => Some(text.as_ref().into()),
        DeValue::Integer(number) => {
            let parsed = i64::from_str_radix(number.as_str(), number.radix()).ok()?;
            Some(parsed.to_string().into())
        }
        DeValue::Float(number) => Some(number.as_str().into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = "\
parallel = 3
rate = '5M'
[defaults]
verify = true
retries = 9
[[disk]]
name = 'root'
source = 'nbd://old/root'
target = 'root.raw'
verify = false
request-size = '64k'
[[disk]]
source = ['qemu-nbd', '-r', '[x']
target = 'data.raw'
source-layer = ['readonly', 'log']
";

    #[test]
    fn keys_are_options() {
        let file = parse("f.toml", TWO, &[]).unwrap();
        assert_eq!(file.common.parallel, Some(3));
        assert_eq!(file.common.rate.as_ref().unwrap().rate_at(0), 5 << 20);
        let [root, data] = &file.disks[..] else { panic!("{} disks", file.disks.len()) };
        assert_eq!((root.name.as_str(), data.name.as_str()), ("root", "2"));
        assert_eq!((root.args.verify, data.args.verify), (false, true));
        assert_eq!((root.args.retries, root.args.request_size), (9, Some(65536)));
        assert_eq!(data.args.source_layer, ["readonly", "log"]);
        let source = data.groups.spec(data.args.source.as_ref().unwrap()).unwrap();
        let words = ["qemu-nbd", "-r", "[x"].map(OsString::from).to_vec();
        assert_eq!(source, blockhaul_catalog::Spec::Command(words));
        assert_eq!(data.place, "f.toml:13");
    }

    #[test]
    fn the_command_line_wins() {
        let flag = |name: &str| Given { name: name.to_string(), values: Vec::new() };
        let value =
            |name: &str, value: &str| Given { name: name.to_string(), values: vec![value.into()] };
        let given = [
            value("job", "f.toml"),
            flag("verify"),
            value("retries", "0"),
            value("rate-file", "/x"),
            value("parallel", "1"),
        ];
        let file = parse("f.toml", TWO, &given).unwrap();
        assert_eq!((file.common.parallel, file.common.rate.is_none()), (Some(1), true));
        assert!(file.disks.iter().all(|disk| disk.args.verify && disk.args.retries == 0));
        assert!(file.disks.iter().all(|disk| disk.args.rate_file.is_none()));
    }

    #[test]
    fn mistakes_are_told_with_their_line_and_key() {
        let disk = "[[disk]]\nsource='a'\ntarget='b'\n";
        for (text, words) in [
            ("", "f.toml:1: it lists no disk"),
            ("x", "f.toml:1: "),
            ("a = 1\na = 2", "f.toml:2: "),
            ("disk = 5", "f.toml:1: write it as [[disk]]"),
            ("disk = [5]", "f.toml:1: write it as [[disk]]"),
            ("defaults = 5", "write it as [defaults]"),
            ("what = 1\n", "f.toml:1: unknown key what"),
            ("paralel = 1\n", "unknown key paralel; did you mean parallel? keys are"),
            ("verify = true\n", "f.toml:1: key verify applies to a disk"),
            ("progress = 'json'\n", "key progress: only allowed on the command line"),
            (
                "parallel = 0\n[[disk]]\nsource='a'\ntarget='b'",
                "f.toml:1: key parallel: invalid value",
            ),
            ("rate = 'x'\n[[disk]]\nsource='a'\ntarget='b'", "f.toml:1: key rate: invalid value"),
            ("[[disk]]\ntarget='b'", "f.toml:2: disk 1 has no source"),
            ("[[disk]]\nsource='a'\nname='n'", "f.toml:2: disk n has no target"),
            ("[[disk]]\nsource='-'\ntarget='b'", "f.toml:2: key source: a job cannot use pipes"),
            ("[[disk]]\nsource=5\ntarget='b'", "f.toml:2: key source must be a device"),
            ("[[disk]]\nsource=[]\ntarget='b'", "no command between [ and ]"),
            (&format!("{disk}retries = 'x'"), "f.toml:4: disk 1: key retries: invalid value 'x'"),
            (&format!("{disk}verify = 'x'"), "f.toml:4: key verify must be true or false"),
            (
                &format!("{disk}retries = true"),
                "f.toml:4: key retries must be a string or a number",
            ),
            (&format!("{disk}rate = '1M'"), "f.toml:4: key rate applies to all disks together"),
            (&format!("{disk}restart = true"), "disk 1: "),
            (
                &format!("{disk}name = 'x'\n{disk}name = 'x'"),
                "another disk also has the name \"x\"",
            ),
            (&format!("{disk}name = ''"), "f.toml:4: key name must be a string"),
            (&format!("[defaults]\nretries = -1\n{disk}"), "f.toml:2: disk 1: key retries"),
        ] {
            let failure =
                parse("f.toml", text, &[]).err().unwrap_or_else(|| panic!("{text:?} is accepted"));
            let said = failure.to_string();
            assert!(said.contains(words), "{text:?}: {said}, not {words}");
            assert_eq!(failure.status(), exit::USAGE);
        }
    }
}
