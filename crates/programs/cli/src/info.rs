//! `blockhaul info`, `blockhaul map`, nbddump and `qemu-nbd --list`: `blockhaul_inspect` finds facts out and formats
//! them; here words become its options, and its errors become exit statuses.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockhaul_block::{BASE_ALLOCATION, Error, Kind};
use blockhaul_catalog::ConnectionSettings;
use blockhaul_client::ConnectOptions;
use blockhaul_inspect::{
    Ability, ContentQuery, Inspection, InspectionError, MapFormat, MapOptions, MapPictures,
};
use blockhaul_io::{IoEngine, Runtime};

use crate::brackets::Groups;
use crate::exit::{CommandFailure, CommandResult, FAILED};
use crate::image_format::{self, ReadDevice};
use crate::out::{self, CommandOutput};
use crate::{args, devices};

/// The exit status of `--can` and similar options if the answer is no.
const NO: u8 = 2;
/// Time without a byte after which nbddump drops a connection: never.
const DUMP_TIMEOUT: Duration = Duration::ZERO;

/// The same of a list of exports.
#[cfg(feature = "formats")]
const LIST_TIMEOUT: Duration = Duration::from_secs(30);

/// Runs `blockhaul info`.
pub fn run(args: &args::InfoArgs, groups: &Groups) -> CommandResult {
    #[cfg(feature = "formats")]
    if args.chain {
        let image = &args.device;
        let backing = args.image.backing;
        let chain = args::InfoChain { image, backing, json: args.json };
        return crate::image_tools::info_chain(&chain, groups);
    }
    let color = args.common.colors.wanted();
    let question = match args {
        args::InfoArgs { list: true, .. } => {
            QueryKind::List { content: content(args, args.content) }
        }
        args::InfoArgs { size: true, .. } => QueryKind::Size,
        args::InfoArgs { uri: true, .. } => QueryKind::Uri { json: args.json },
        args::InfoArgs { can: Some(word), .. } => QueryKind::Can(ability(word)?, true),
        args::InfoArgs { cannot: Some(word), .. } => QueryKind::Can(ability(word)?, false),
        args::InfoArgs { map: Some(context), totals, .. } => {
            let format = if args.json { MapFormat::Json } else { MapFormat::Text };
            let options = MapOptions { format, totals: *totals, color, ..MapOptions::default() };
            QueryKind::Map(vec![context.clone()], options, None)
        }
        _ => QueryKind::All { content: content(args, !args.no_content) },
    };
    ask(
        InfoQuery::new(question, args.json, &args.common),
        image_format::read_device(groups.spec(&args.device)?, &args.image)?,
    )
}

/// The facts of contents to report. nbdinfo reports no partitions and no disks of archives.
fn content(args: &args::InfoArgs, kind: bool) -> ContentQuery {
    ContentQuery { kind, partitions: kind && !args.is_nbdinfo, archive: !args.is_nbdinfo }
}

/// Runs `blockhaul map`.
pub fn run_map(args: &args::MapArgs, groups: &Groups) -> CommandResult {
    let color = args.common.colors.wanted();
    let pictures = args.strip || args.svg.is_some();
    let format = match args.output.as_deref() {
        Some("json") => MapFormat::Json,
        Some("json-lines") => MapFormat::JsonLines,
        Some("qemu") => MapFormat::Qemu,
        None if args.json => MapFormat::Json,
        None if pictures && !args.totals => MapFormat::Nothing,
        _ => MapFormat::Text,
    };
    // A list in JSON is whole or not there.
    let streams = matches!(format, MapFormat::Text | MapFormat::JsonLines);
    let options = MapOptions {
        format,
        range: args.range,
        totals: args.totals,
        color,
        streams,
        strip: args.strip,
        image: args.svg.is_some(),
    };
    let question = QueryKind::Map(contexts(&args.context)?, options, args.svg.clone());
    ask(
        InfoQuery::new(question, args.json, &args.common),
        image_format::read_device(groups.spec(&args.device)?, &args.image)?,
    )
}

/// Runs nbddump.
pub fn run_dump(dump: blockhaul_command_lines::nbddump::DumpRequest) -> CommandResult {
    let blockhaul_command_lines::nbddump::DumpRequest { spec, color, offset, length } = dump;
    let color = color.unwrap_or_else(|| std::io::stdout().is_terminal());
    let question = QueryKind::Dump(offset, length);
    let query = InfoQuery { question, json: false, color, timeout: DUMP_TIMEOUT, verbose: false };
    ask(query, ReadDevice { spec, layers: Vec::new() })
}

/// Lists the exports of a server as qemu-nbd does.
#[cfg(feature = "formats")]
pub fn run_qemu_list(uri: &str) -> CommandResult {
    let spec = blockhaul_catalog::DeviceSpec::parse(uri.as_ref())?;
    let question = QueryKind::QemuList;
    ask(
        InfoQuery { question, json: false, color: false, timeout: LIST_TIMEOUT, verbose: false },
        ReadDevice { spec, layers: Vec::new() },
    )
}

/// The contexts to show: each once.
fn contexts(names: &[String]) -> Result<Vec<String>, CommandFailure> {
    match names.iter().enumerate().find(|(index, name)| names[..*index].contains(name)) {
        Some((_, twice)) => Err(CommandFailure::usage(format!("--context {twice} is given twice"))),
        None => Ok(names.to_vec()),
    }
}

/// The facts of devices, with their names, as `--json` prints them.
#[cfg(feature = "fuse")]
pub fn json_of(devices: &[(&str, std::sync::Arc<blockhaul_block::Facts>)]) -> String {
    blockhaul_inspect::InspectionReport::of_devices(devices).json()
}

/// The property of `--can`, `--is` or `--has`.
fn ability(word: &str) -> Result<Ability, CommandFailure> {
    Ability::parse(word).ok_or_else(|| {
        let known: Vec<_> = Ability::names().collect();
        let text =
            format!("unknown --can/--is/--has option: {word}; known are {}", known.join(", "));
        CommandFailure::new(FAILED, text)
    })
}

struct InfoQuery {
    question: QueryKind,
    json: bool,
    color: bool,
    timeout: Duration,
    verbose: bool,
}

impl InfoQuery {
    fn new(question: QueryKind, json: bool, options: &args::InspectionOptions) -> InfoQuery {
        let &args::InspectionOptions { timeout, verbose, ref colors } = options;
        InfoQuery { question, json, color: colors.wanted(), timeout, verbose }
    }
}

enum QueryKind {
    All {
        content: ContentQuery,
    },
    List {
        content: ContentQuery,
    },
    #[cfg(feature = "formats")]
    QemuList,
    Size,
    Uri {
        json: bool,
    },
    Can(Ability, bool),
    Map(Vec<String>, MapOptions, Option<PathBuf>),
    Dump(u64, u64),
}

fn ask(request: InfoQuery, device: ReadDevice) -> CommandResult {
    crate::logger::start(request.verbose);
    if let QueryKind::Map(_, options, _) = &request.question {
        if options.strip || options.format != MapFormat::Nothing {
            out::check_open("the map")?;
        }
        image_format::warn_of_read(&device);
    }
    let ReadDevice { spec, layers } = device;
    let timeout = request.timeout;
    let options = ConnectOptions::default().connecting(&ConnectionSettings::with_timeout(timeout));
    let name = spec.to_string();
    let inspection = Inspection::new(spec, &layers, devices::registry(timeout), options)?;
    let config = blockhaul_io::RuntimeConfig { workers: 1, engine: IoEngine::Auto };
    let runtime = Runtime::start(&config).map_err(|error| {
        CommandFailure::new(FAILED, format!("cannot start: {}", crate::exit::plain(&error)))
    })?;
    let (answered, inspection) = runtime.block_on(move || async move {
        let answered = answer(&inspection, &name, request).await;
        (answered, inspection)
    });
    // Not on a worker: this waits for the server of `[ CMD ]`, which ends when the worker has
    // closed its connections.
    drop(inspection);
    let (output, status) = answered?;
    output.finish()?;
    status
}

/// The output, and the exit status after it.
async fn answer(
    inspection: &Inspection,
    name: &str,
    request: InfoQuery,
) -> Result<(CommandOutput, CommandResult), CommandFailure> {
    let mut output = CommandOutput::default();
    let InfoQuery { question, json, color, .. } = request;
    match question {
        QueryKind::All { content } => {
            let report = inspection.report(content).await?;
            output.text(&if json { report.json() } else { report.text(color) })?;
        }
        QueryKind::List { content } => {
            if let Some(mut list) = inspection.objects().await? {
                blockhaul_inspect::write_objects(name, &mut *list, json, &mut output).await?;
                return Ok((output, Ok(0)));
            }
            let (report, failed) = inspection.list(content).await?;
            output.text(&if json { report.json() } else { report.text(color) })?;
            if let Some(failure) = failed {
                return Ok((output, Err(failure.into())));
            }
        }
        #[cfg(feature = "formats")]
        QueryKind::QemuList => {
            let (report, failed) = inspection.list(ContentQuery::default()).await?;
            if let Some(failure) = failed {
                return Err(failure.into());
            }
            output.text(&report.qemu_list())?;
        }
        QueryKind::Size => output
            .text(&format!("{}\n", inspection.report(ContentQuery::default()).await?.size()))?,
        QueryKind::Uri { json } => {
            let uri = inspection.uri().await?.ok_or_else(|| {
                let why = "has no URI: use --uri with a server that has an address";
                CommandFailure::new(FAILED, format!("{name} {why}"))
            })?;
            let uri = if json { serde_json::Value::from(uri).to_string() } else { uri };
            output.text(&format!("{uri}\n"))?;
        }
        QueryKind::Can(ability, wanted) => {
            let report = if ability.is_of_server() {
                inspection.server().await?
            } else {
                inspection.report(ContentQuery::default()).await?
            };
            let able = ability.is_in(&report);
            return Ok((output, Ok(if able == wanted { 0 } else { NO })));
        }
        QueryKind::Map(contexts, options, svg) => {
            let (device, contexts) = inspection.device_with_contexts(&contexts).await?;
            let map = blockhaul_inspect::write_map(&device, contexts, &options, output).await?;
            let pictures;
            (output, pictures) = map;
            output.text(&pictures.strips(options.color))?;
            write_svg(&pictures, svg.as_deref())?;
        }
        QueryKind::Dump(offset, length) => {
            let device = inspection.device().await?;
            blockhaul_inspect::write_dump(&device, (offset, length), color, &mut output).await?;
        }
    }
    Ok((output, Ok(0)))
}

/// Writes the image of a map.
fn write_svg(pictures: &MapPictures, path: Option<&Path>) -> Result<(), CommandFailure> {
    let Some(path) = path else { return Ok(()) };
    std::fs::write(path, pictures.svg()).map_err(|error| {
        let text = format!("cannot write {}: {}", path.display(), crate::exit::plain(&error));
        CommandFailure::new(FAILED, text)
    })
}

impl From<InspectionError> for CommandFailure {
    fn from(error: InspectionError) -> CommandFailure {
        match error {
            InspectionError::Open { device, error } => {
                CommandFailure::opening("device", &device, &error)
            }
            InspectionError::Context { .. } => {
                Error::new(Kind::Unsupported, format!("--map: {error}")).into()
            }
            InspectionError::QemuContexts => {
                CommandFailure::usage(format!("--format qemu shows {BASE_ALLOCATION} only"))
            }
            InspectionError::Range { .. } => CommandFailure::usage(format!("--{error}")),
            InspectionError::Device(error) => error.into(),
            InspectionError::Output(error) => crate::out::failed(&error),
            InspectionError::Export { .. } => CommandFailure::new(FAILED, error.to_string()),
        }
    }
}
