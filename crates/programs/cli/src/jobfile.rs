//! Job files: several disks and how to copy each, in TOML. Keys are the long option names of
//! `blockhaul copy`: each option has only one definition. Files of `blockhaul pull` have further
//! keys ([`PULL`]).

use std::collections::{BTreeMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::path::Path;

use blockhaul_catalog::DeviceSpec;
use blockhaul_server_config::{TomlEntry, TomlText, toml_entry, toml_start, toml_word};
use blockhaul_transfer::{
    NamedOption, OptionRow, OptionValue, OptionValueError, TRANSFER_OPTIONS, TransferOptions,
    find_option, number, toml_fault,
};
use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use crate::args::{CopyOption, ImageFormatArgs, total_memory};
use crate::exit::{self, CommandFailure, plain};
use crate::session::SessionOptions;

/// Options that apply to all disks together.
static COMMON: &[OptionRow<JobFileOptions>] = &[
    OptionRow::value("parallel", "N", |o, text| {
        number(text, 1, 1024).map(|number| o.parallel = Some(number))
    }),
    OptionRow::value("total-memory", "SIZE", |o, text| {
        parsed(text, total_memory).map(|bytes| o.total_memory = Some(bytes))
    }),
    OptionRow::value("total-connections", "N", |o, text| {
        number(text, 1, 1024).map(|number| o.total_connections = Some(number))
    }),
    OptionRow::value("threads", "N", |o, text| {
        number(text, 0, 1024).map(|number| o.session.threads = number)
    }),
    OptionRow::value("engine", "NAME", |o, text| {
        parsed(text, |text| text.parse()).map(|engine| o.session.engine.engine = engine)
    }),
    OptionRow::list("metrics", "ADDR", |o, texts| {
        let parse =
            |text: &OsString| parsed(text, |text| text.parse()).map_err(|why| (text.clone(), why));
        texts.iter().map(parse).collect::<Result<_, _>>().map(|all| o.session.metrics = all)
    }),
    OptionRow::flag("page", |o| &mut o.session.page),
];

/// Options that apply to all disks together, and are those of one copy, too.
const LIMITS: &[&str] = &["rate", "rate-file", "iops", "no-zero-copy"];

/// Options about the image that a source is.
static IMAGE: &[OptionRow<ImageFormatArgs>] = &[
    OptionRow::value("format", "FORMAT", |o, text| {
        one_of(text).map(|format| o.format = Some(format))
    }),
    OptionRow::value("backing", "WHETHER", |o, text| {
        one_of(text).map(|backing| o.backing = Some(backing))
    }),
    OptionRow::value("partition", "N", |o, text| {
        number(text, 1, u32::MAX.into()).map(|number| o.partition.partition = Some(number))
    }),
];

/// Options that apply to all disks together, for the command line only.
const SPOKEN: &[&str] =
    &["job", "progress", "no-progress", "verbose", "log-format", "help", "dry-run", "json"];

/// Kinds of job files.
pub struct JobFileSyntax {
    /// Keys of a disk that must be there, besides its source: devices.
    sides: &'static [&'static str],
    /// Further keys of a disk with a text.
    texts: &'static [&'static str],
    /// Further keys of a disk with a list of names of files.
    lists: &'static [&'static str],
    /// Further keys of a disk that are true or false.
    flags: &'static [&'static str],
    /// Options that have no meaning here.
    refused: &'static [&'static str],
    /// The command, for messages.
    command: &'static str,
}

/// Files of `blockhaul copy --job`.
const COPY: JobFileSyntax = JobFileSyntax {
    sides: &["source", "target"],
    texts: &[],
    lists: &[],
    flags: &[],
    refused: &[],
    command: "copy",
};

/// Files of `blockhaul pull`: the target of a disk is a file of its store.
const PULL: JobFileSyntax = JobFileSyntax {
    sides: &["source"],
    texts: &["store", "bitmap", "parent", "point", "checkpoint", "mode"],
    lists: &["files"],
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
        "on-error",
        "error-map",
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

/// Options for all disks of a job together.
#[derive(Debug, Clone, Default)]
pub struct JobFileOptions {
    /// The limits of the rate, and whether the kernel may copy; others are those of each disk.
    pub limits: TransferOptions,
    /// Disks to copy at a time, from 1 to 1024.
    pub parallel: Option<u16>,
    /// Bytes in flight; `None`: what the largest disk uses alone.
    pub total_memory: Option<u64>,
    /// Connections to all sources, and to all targets, from 1 to 1024.
    pub total_connections: Option<u16>,
    /// The workers, and what they publish.
    pub session: SessionOptions,
}

/// The contents of a job file, combined with the command line.
pub struct JobFile {
    /// Options for all disks together.
    pub common: JobFileOptions,
    /// The disks, in the file's order.
    pub disks: Vec<JobFileDisk>,
}

/// A disk of the file.
pub struct JobFileDisk {
    /// Its name, or number.
    pub name: String,
    /// Its position in the file, for messages.
    pub place: String,
    /// The source.
    pub source: DeviceSpec,
    /// The target; `None` in a file of `blockhaul pull`, which writes to a store.
    pub target: Option<DeviceSpec>,
    /// How to copy the disk.
    pub options: TransferOptions,
    /// The image that the source is.
    pub image: ImageFormatArgs,
    /// Keys that are not options of `copy`, as text; lists with one name a line.
    pub keys: BTreeMap<String, String>,
}

/// Reads a job file; options on the command line take precedence.
pub fn read(path: &Path, given: &[CopyOption]) -> Result<JobFile, CommandFailure> {
    read_shaped(&COPY, path, given)
}

/// Reads a file of `blockhaul pull`. The target and the journal of each disk are yet to be set.
pub fn read_pull(path: &Path) -> Result<JobFile, CommandFailure> {
    read_shaped(&PULL, path, &[])
}

fn read_shaped(
    shape: &'static JobFileSyntax,
    path: &Path,
    given: &[CopyOption],
) -> Result<JobFile, CommandFailure> {
    let unusable = |error: std::io::Error| {
        let text = format!("cannot read the job file {}: {}", path.display(), plain(&error));
        CommandFailure::new(exit::OPEN, text)
    };
    let mut text = String::new();
    let mut file = std::io::Read::take(std::fs::File::open(path).map_err(unusable)?, LONGEST + 1);
    std::io::Read::read_to_string(&mut file, &mut text).map_err(unusable)?;
    if text.len() as u64 > LONGEST {
        let text = format!("the job file {} is longer than {LONGEST} bytes", path.display());
        return Err(CommandFailure::usage(text));
    }
    parse_shaped(shape, &path.display().to_string(), &text, given)
}

#[cfg(any(test, fuzzing))]
pub fn parse(path: &str, text: &str, given: &[CopyOption]) -> Result<JobFile, CommandFailure> {
    parse_shaped(&COPY, path, text, given)
}

/// Parses a file of `blockhaul pull`.
#[cfg(any(test, fuzzing))]
pub fn parse_pull(path: &str, text: &str) -> Result<JobFile, CommandFailure> {
    parse_shaped(&PULL, path, text, &[])
}

fn parse_shaped(
    shape: &'static JobFileSyntax,
    path: &str,
    text: &str,
    given: &[CopyOption],
) -> Result<JobFile, CommandFailure> {
    let reader = JobFileReader { shape, file: TomlText { path, text } };
    let parsed = DeTable::parse(text);
    let table = parsed.map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        reader.wrong(at, toml_fault(text, at, error.message()))
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
    let (together, given): (Vec<_>, Vec<_>) = given
        .iter()
        .filter(|given| !SPOKEN.contains(&given.name.as_str()))
        .partition(|given| is_common(&given.name));
    let common = reader.common(common, &together)?;
    let mut names = HashSet::new();
    let mut made = Vec::new();
    for (number, disk) in (1_usize..).zip(list.iter()) {
        let disk = reader.disk(number, disk, &defaults, &given)?;
        if !names.insert(disk.name.clone()) {
            let text = format!("{}: another disk also has the name {:?}", disk.place, disk.name);
            return Err(CommandFailure::usage(text));
        }
        made.push(disk);
    }
    Ok(JobFile { common, disks: made })
}

/// Whether an option applies to all disks together.
fn is_common(name: &str) -> bool {
    LIMITS.contains(&name) || find_option(COMMON, name).is_some()
}

/// The names of all options of `copy`.
fn names() -> impl Iterator<Item = &'static str> {
    let common = COMMON.iter().map(|row| row.name);
    let image = IMAGE.iter().map(|row| row.name);
    let transfer = TRANSFER_OPTIONS.iter().map(|row| row.name);
    transfer.chain(common).chain(image).chain(SPOKEN.iter().copied())
}

fn parsed<T, E: Display>(text: &OsStr, parse: fn(&str) -> Result<T, E>) -> Result<T, String> {
    let text = text.to_str().ok_or("it is not UTF-8")?;
    parse(text).map_err(|why| why.to_string())
}

/// One of the names of an enumeration.
fn one_of<T: clap::ValueEnum>(text: &OsStr) -> Result<T, String> {
    let found = text.to_str().and_then(|text| T::from_str(text, false).ok());
    let names = || {
        let values = T::value_variants().iter().filter_map(T::to_possible_value);
        let names: Vec<_> = values.map(|value| value.get_name().to_string()).collect();
        format!("[possible values: {}]", names.join(", "))
    };
    found.ok_or_else(names)
}

/// An option in the file, or on the command line.
#[derive(Debug, Clone)]
struct OptionEntry {
    name: String,
    value: OptionValue,
    /// The offset of its key in the file.
    at: usize,
}

impl OptionEntry {
    /// An option of the command line, for what begins at this offset.
    fn given(given: &CopyOption, at: usize) -> OptionEntry {
        let NamedOption { name, value } = NamedOption::from_texts(&given.name, &given.values);
        OptionEntry { name, value, at }
    }
}

/// The table `[defaults]`.
#[derive(Default)]
struct Defaults {
    options: Vec<OptionEntry>,
    keys: BTreeMap<String, String>,
}

struct JobFileReader<'a> {
    shape: &'static JobFileSyntax,
    file: TomlText<'a>,
}

impl JobFileReader<'_> {
    /// The position of byte `at` in the file, for users.
    fn place(&self, at: usize) -> String {
        format!("{}:{}", self.file.path, self.file.line(at))
    }

    fn wrong(&self, at: usize, why: impl Display) -> CommandFailure {
        CommandFailure::usage(self.file.fault(at, why).to_string())
    }

    /// The options of a table, except the keys in `others` and those of the shape.
    fn options(
        &self,
        table: &DeTable<'_>,
        others: &[&str],
    ) -> Result<Vec<OptionEntry>, CommandFailure> {
        let JobFileSyntax { texts, lists, flags, .. } = self.shape;
        let own = table.iter().filter(|(key, _)| {
            let key = key.get_ref().as_ref();
            ![others, texts, lists, flags].iter().any(|keys| keys.contains(&key))
        });
        own.map(|(key, value)| self.option(key, value, false)).collect()
    }

    /// The keys of the shape in a table.
    fn keys(&self, table: &DeTable<'_>) -> Result<BTreeMap<String, String>, CommandFailure> {
        let mut keys = BTreeMap::new();
        for (key, value) in table {
            let name = key.get_ref().as_ref();
            let at = key.span().start;
            let text = if self.shape.texts.contains(&name) {
                let text = value.get_ref().as_str().map(str::to_string);
                text.ok_or_else(|| self.wrong(at, format!("key {name} must be a string")))?
            } else if self.shape.lists.contains(&name) {
                let line = |name: &DeValue<'_>| {
                    name.as_str().filter(|name| !name.contains('\n')).map(str::to_string)
                };
                let lines = value.get_ref().as_array().and_then(|list| {
                    list.iter().map(|name| line(name.get_ref())).collect::<Option<Vec<_>>>()
                });
                let wrong =
                    || self.wrong(at, format!("key {name} must be a list of names of files"));
                lines.ok_or_else(wrong)?.join("\n")
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
    ) -> Result<OptionEntry, CommandFailure> {
        let name = key.get_ref().as_ref();
        let at = key.span().start;
        let of_tables = |list: &DeArray<'_>| list.iter().any(|one| one.get_ref().is_table());
        if value.get_ref().is_table() || value.get_ref().as_array().is_some_and(of_tables) {
            let why = format!("unknown table {name}; tables are [[disk]] and [defaults]");
            return Err(self.wrong(at, why));
        }
        self.check_name(name, common).map_err(|text| self.wrong(at, text))?;
        let value = match value.get_ref() {
            DeValue::Boolean(on) => OptionValue::Switch(*on),
            DeValue::Array(list) => {
                let texts: Option<Vec<_>> =
                    list.iter().map(|value| word(value.get_ref())).collect();
                OptionValue::Texts(texts.unwrap_or_default())
            }
            value => OptionValue::Texts(word(value).into_iter().collect()),
        };
        let keyed = OptionEntry { name: name.to_string(), value, at };
        // A wrong kind of value is reported even where another one takes precedence.
        match self.set(&keyed, &mut JobFileOptions::default(), &mut DiskOptions::default()) {
            Err(OptionValueError::NotSwitch) => {
                Err(self.wrong(at, format!("key {name} must be true or false")))
            }
            Err(OptionValueError::NoValue) => {
                Err(self.wrong(at, format!("key {name} must be a string or a number")))
            }
            Ok(()) | Err(OptionValueError::Invalid(_)) => Ok(keyed),
        }
    }

    /// Refuses a key that is no option, or that is none of this table.
    fn check_name(&self, name: &str, common: bool) -> Result<(), String> {
        if SPOKEN.contains(&name) {
            return Err(format!("key {name}: only allowed on the command line"));
        }
        if self.shape.refused.contains(&name) {
            return Err(format!("key {name}: not for blockhaul {}", self.shape.command));
        }
        if !names().any(|known| known == name) {
            let JobFileSyntax { sides, texts, flags, .. } = self.shape;
            let own = [*sides, texts, flags].concat();
            if own.contains(&name) {
                return Err(format!("key {name} belongs to one disk: write it under its [[disk]]"));
            }
            let near = blockhaul_catalog::nearest(name, names().chain(own));
            let near = near.map(|near| format!("did you mean {near}? ")).unwrap_or_default();
            return Err(format!(
                "unknown key {name}; {near}keys are the long options of blockhaul copy"
            ));
        }
        match (common, is_common(name)) {
            (true, false) => Err(format!(
                "key {name} applies to a disk: write it under its [[disk]], or under [defaults]"
            )),
            (false, true) => Err(format!(
                "key {name} applies to all disks together: write it before the first table"
            )),
            _ => Ok(()),
        }
    }

    /// Sets an option where it belongs.
    fn set(
        &self,
        option: &OptionEntry,
        job: &mut JobFileOptions,
        disk: &mut DiskOptions,
    ) -> Result<(), OptionValueError> {
        let OptionEntry { name, value, .. } = option;
        if let Some(row) = find_option(COMMON, name) {
            return row.set(job, value);
        }
        if let Some(row) = find_option(IMAGE, name) {
            return row.set(&mut disk.image, value);
        }
        let transfer =
            if LIMITS.contains(&name.as_str()) { &mut job.limits } else { &mut disk.transfer };
        find_option(TRANSFER_OPTIONS, name).map_or(Ok(()), |row| row.set(transfer, value))
    }

    /// Sets options. Errors name the key with the invalid value, after `whose`.
    fn set_all(
        &self,
        options: &[OptionEntry],
        whose: &str,
        job: &mut JobFileOptions,
        disk: &mut DiskOptions,
    ) -> Result<(), CommandFailure> {
        for option in options {
            let set = self.set(option, job, disk);
            set.map_err(|error| {
                self.wrong(option.at, format!("{whose}key {}: {error}", option.name))
            })?;
        }
        Ok(())
    }

    /// Refuses options that do not go together.
    fn check(
        &self,
        transfer: &TransferOptions,
        options: &[OptionEntry],
        at: usize,
        whose: &str,
    ) -> Result<(), CommandFailure> {
        let Err(conflict) = transfer.check() else { return Ok(()) };
        let found = options.iter().find(|option| option.name == conflict.fields[0]);
        let key = found.filter(|_| !conflict.is_requirement());
        let key = key.map(|option| format!("key {}: ", option.name)).unwrap_or_default();
        Err(self.wrong(found.map_or(at, |option| option.at), format!("{whose}{key}{conflict}")))
    }

    /// The options for all disks together; those of the command line take precedence.
    fn common(
        &self,
        mut options: Vec<OptionEntry>,
        given: &[&CopyOption],
    ) -> Result<JobFileOptions, CommandFailure> {
        let rates = ["rate", "rate-file"];
        let limited = given.iter().any(|given| rates.contains(&given.name.as_str()));
        options.retain(|option| {
            let name = option.name.as_str();
            let said = given.iter().any(|given| given.name == name);
            !said && (!limited || !rates.contains(&name))
        });
        options.extend(given.iter().map(|given| OptionEntry::given(given, 0)));
        let mut common = JobFileOptions::default();
        self.set_all(&options, "", &mut common, &mut DiskOptions::default())?;
        self.check(&common.limits, &options, 0, "")?;
        if common.session.page && common.session.metrics.is_empty() {
            let text = "the following required arguments were not provided: --metrics <ADDR>";
            return Err(self.wrong(0, text));
        }
        Ok(common)
    }

    fn disk(
        &self,
        number: usize,
        disk: &Spanned<DeValue<'_>>,
        defaults: &Defaults,
        given: &[&CopyOption],
    ) -> Result<JobFileDisk, CommandFailure> {
        let DeValue::Table(table) = disk.get_ref() else {
            return Err(self.wrong(disk.span().start, "write it as [[disk]]"));
        };
        let at = toml_start(table).unwrap_or(disk.span().start);
        let name = match toml_entry(table, "name") {
            None => number.to_string(),
            Some((key, value)) => {
                let name = value.get_ref().as_str().filter(|name| !name.is_empty());
                let wrong = || self.wrong(key.span().start, "key name must be a string");
                name.ok_or_else(wrong)?.to_string()
            }
        };
        let whose = format!("disk {name}: ");
        let options = self.disk_options(table, defaults, given, at)?;
        let mut keys = defaults.keys.clone();
        keys.extend(self.keys(table)?);
        let mut sides = Vec::new();
        for role in self.shape.sides {
            let Some(side) = toml_entry(table, role) else {
                return Err(self.wrong(at, format!("disk {name} has no {role}")));
            };
            sides.push(self.side(role, side, at, &whose)?);
        }
        let mut set = DiskOptions::default();
        self.set_all(&options, &whose, &mut JobFileOptions::default(), &mut set)?;
        // The journal of a pull is yet to be set.
        if self.shape.sides.len() > 1 {
            self.check(&set.transfer, &options, at, &whose)?;
        }
        let DiskOptions { transfer, image } = set;
        let place = self.place(at);
        let mut sides = sides.into_iter();
        let source = sides.next().expect("each shape has a source");
        Ok(JobFileDisk {
            name,
            place,
            source,
            target: sides.next(),
            options: transfer,
            image,
            keys,
        })
    }

    /// The options of a disk: its own, those of `[defaults]`, and those of the command line, which take
    /// precedence.
    fn disk_options(
        &self,
        table: &DeTable<'_>,
        defaults: &Defaults,
        given: &[&CopyOption],
        at: usize,
    ) -> Result<Vec<OptionEntry>, CommandFailure> {
        let mut options = self.options(table, &[&["name"], self.shape.sides].concat())?;
        let own_names: Vec<_> = options.iter().map(|option| option.name.clone()).collect();
        let other = defaults.options.iter().filter(|option| !own_names.contains(&option.name));
        options.extend(other.cloned());
        options.retain(|option| !given.iter().any(|given| given.name == option.name));
        options.extend(given.iter().map(|given| OptionEntry::given(given, at)));
        Ok(options)
    }

    /// A side of a disk: a description, or the words that start a server.
    fn side(
        &self,
        role: &str,
        (key, value): TomlEntry<'_, '_>,
        at: usize,
        whose: &str,
    ) -> Result<DeviceSpec, CommandFailure> {
        let wrong = || {
            let text =
                format!("key {role} must be a device, or a list of words that start a server");
            self.wrong(key.span().start, text)
        };
        match value.get_ref() {
            DeValue::String(device) if device == "-" => {
                let text = format!("key {role}: a job cannot use pipes");
                Err(self.wrong(key.span().start, text))
            }
            DeValue::String(device) => DeviceSpec::parse(OsStr::new(device.as_ref()))
                .map_err(|error| self.wrong(at, format!("{whose}{error}"))),
            DeValue::Array(list) => {
                let server: Option<Vec<_>> =
                    list.iter().map(|value| word(value.get_ref())).collect();
                let server = server.ok_or_else(wrong)?;
                if server.is_empty() {
                    return Err(self.wrong(at, format!("{whose}no command between [ and ]")));
                }
                Ok(DeviceSpec::Command(server))
            }
            _ => Err(wrong()),
        }
    }
}

/// The options of one disk.
#[derive(Default)]
struct DiskOptions {
    transfer: TransferOptions,
    image: ImageFormatArgs,
}

/// A value of the file as on the command line.
fn word(value: &DeValue<'_>) -> Option<OsString> {
    toml_word(value).map(OsString::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args;

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
        assert_eq!(file.common.limits.rate.as_ref().unwrap().rate_at(0, 0), 5 << 20);
        let [root, data] = &file.disks[..] else { panic!("{} disks", file.disks.len()) };
        assert_eq!((root.name.as_str(), data.name.as_str()), ("root", "2"));
        assert_eq!((root.options.verify, data.options.verify), (false, true));
        assert_eq!((root.options.retries, root.options.request_size), (9, Some(65536)));
        assert_eq!(data.options.source_layer, ["readonly", "log"]);
        let words = ["qemu-nbd", "-r", "[x"].map(OsString::from).to_vec();
        assert_eq!(data.source, DeviceSpec::Command(words));
        assert_eq!(data.place, "f.toml:13");
    }

    /// What the command line says about an option with this value, if it refuses the value.
    fn refused_by_command(name: &str, text: &str) -> Option<String> {
        use clap::error::ErrorKind::{InvalidValue, ValueValidation};
        let words = [format!("--{name}={text}"), "a".into(), "b".into()].map(OsString::from);
        let error = args::parse_command::<args::CopyArgs>("copy", words.to_vec()).err()?;
        let rendered = error.to_string();
        let lines = rendered.lines().take_while(|line| !line.trim().is_empty());
        let text = lines.map(str::trim).collect::<Vec<_>>().join(" ");
        let is_about_value = matches!(error.kind(), InvalidValue | ValueValidation);
        is_about_value.then(|| text.trim_start_matches("error: ").to_string())
    }

    fn compare<T: Default>(rows: &[OptionRow<T>], copy: &clap::Command) {
        let mut bad = Vec::new();
        for row in rows {
            let found = copy.get_arguments().find(|option| option.get_long() == Some(row.name));
            let option = found.unwrap_or_else(|| panic!("{} is no option", row.name));
            let names = option.get_value_names().and_then(|names| names.first());
            let takes = option.get_action().takes_values();
            let placeholder = names.filter(|_| takes).map(|name| name.as_str());
            assert_eq!(row.placeholder(), placeholder, "{}", row.name);
            if !takes {
                continue;
            }
            for text in
                ["", "x", "0", "1", "-1", "7k", "4096", "99999999999", "0:0", "auto", "localhost:0"]
            {
                let value = OptionValue::Texts(vec![text.into()]);
                let refused = row.set(&mut T::default(), &value).err();
                let refused = refused.map(|error| error.to_string());
                let expected = refused_by_command(row.name, text);
                if refused != expected {
                    bad.push(format!("{}={text:?}: {refused:?} {expected:?}", row.name));
                }
            }
        }
        assert!(bad.is_empty(), "{bad:#?}");
    }

    #[test]
    fn options_of_files_are_those_of_the_command_with_the_same_values_and_errors() {
        let copy = args::definition_of::<args::CopyArgs>("copy");
        for option in copy.get_arguments().filter_map(clap::Arg::get_long) {
            assert!(names().any(|name| name == option), "{option} is in no table");
        }
        compare(TRANSFER_OPTIONS, &copy);
        compare(COMMON, &copy);
        compare(IMAGE, &copy);
    }

    #[test]
    fn the_command_line_wins() {
        let flag = |name: &str| CopyOption { name: name.to_string(), values: Vec::new() };
        let value = |name: &str, value: &str| CopyOption {
            name: name.to_string(),
            values: vec![value.into()],
        };
        let given = [
            value("job", "f.toml"),
            flag("verify"),
            value("retries", "0"),
            value("rate-file", "/x"),
            value("parallel", "1"),
        ];
        let file = parse("f.toml", TWO, &given).unwrap();
        assert_eq!((file.common.parallel, file.common.limits.rate.is_none()), (Some(1), true));
        assert!(file.disks.iter().all(|disk| disk.options.verify && disk.options.retries == 0));
        assert!(file.disks.iter().all(|disk| disk.options.rate_file.is_none()));
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
            ("[[disc]]\nsource='a'\n", "f.toml:1: unknown table disc; tables are [[disk]]"),
            ("[default]\nverify=true\n", "f.toml:1: unknown table default; tables are"),
            ("source='a'\n", "f.toml:1: key source belongs to one disk"),
            ("[[disk]]\nsorce='a'\n", "unknown key sorce; did you mean source? keys are"),
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
