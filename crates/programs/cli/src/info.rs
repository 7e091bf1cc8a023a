//! `blockhaul info`, `blockhaul map`, nbddump and `qemu-nbd --list`: `blockhaul_inspect` finds facts out and formats
//! them; here words become its options, and its errors become exit statuses.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockhaul_block::{BASE_ALLOCATION, Error, Kind};
use blockhaul_catalog::ConnectionSettings;
use blockhaul_client::Options;
use blockhaul_inspect::{Ability, Inspection, InspectionError, MapFormat, MapOptions, MapPictures};
use blockhaul_io::{Engine, Runtime};

use crate::brackets::Groups;
use crate::exit::{FAILED, Failure, Outcome};
use crate::out::Output;
use crate::{args, devices, image_format};

/// The exit status of `--can` and similar options if the answer is no.
const NO: u8 = 2;
/// Time without a byte after which nbddump drops a connection: never.
const DUMP_TIMEOUT: Duration = Duration::ZERO;

/// The same of a list of exports.
#[cfg(feature = "formats")]
const LIST_TIMEOUT: Duration = Duration::from_secs(30);

/// Runs `blockhaul info`.
pub fn run(args: &args::Info, groups: &Groups) -> Outcome {
    #[cfg(feature = "formats")]
    if args.chain {
        let image = &args.device;
        let backing = args.image.backing;
        let chain = args::InfoChain { image, backing, json: args.json };
        return crate::image_tools::info_chain(&chain, groups);
    }
    let color = args.common.colors.wanted();
    let question = match args {
        args::Info { list: true, .. } => Question::List { content: args.content },
        args::Info { size: true, .. } => Question::Size,
        args::Info { uri: true, .. } => Question::Uri { json: args.json },
        args::Info { can: Some(word), .. } => Question::Can(ability(word)?, true),
        args::Info { cannot: Some(word), .. } => Question::Can(ability(word)?, false),
        args::Info { map: Some(context), totals, .. } => {
            let format = if args.json { MapFormat::Json } else { MapFormat::Text };
            let options = MapOptions { format, totals: *totals, color, ..MapOptions::default() };
            Question::Map(vec![context.clone()], options, None)
        }
        _ => Question::All { content: !args.no_content },
    };
    ask(
        Request::new(question, args.json, &args.common),
        image_format::chosen(groups.spec(&args.device)?, &args.image)?,
    )
}

/// Runs `blockhaul map`.
pub fn run_map(args: &args::Map, groups: &Groups) -> Outcome {
    let color = args.common.colors.wanted();
    let pictures = args.strip || args.svg.is_some();
    let format = match args.format.as_deref() {
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
    let question = Question::Map(contexts(&args.context)?, options, args.svg.clone());
    ask(
        Request::new(question, args.json, &args.common),
        image_format::chosen(groups.spec(&args.device)?, &(&args.image).into())?,
    )
}

/// Runs nbddump.
pub fn run_dump(dump: blockhaul_command_lines::nbddump::Dump) -> Outcome {
    let blockhaul_command_lines::nbddump::Dump { spec, color, offset, length } = dump;
    let color = color.unwrap_or_else(|| std::io::stdout().is_terminal());
    let question = Question::Dump(offset, length);
    ask(Request { question, json: false, color, timeout: DUMP_TIMEOUT, verbose: false }, spec)
}

/// Lists the exports of a server as qemu-nbd does.
#[cfg(feature = "formats")]
pub fn run_qemu_list(uri: &str) -> Outcome {
    let spec = blockhaul_catalog::Spec::parse(uri.as_ref())?;
    let question = Question::QemuList;
    ask(
        Request { question, json: false, color: false, timeout: LIST_TIMEOUT, verbose: false },
        spec,
    )
}

/// The contexts to show: each once.
fn contexts(names: &[String]) -> Result<Vec<String>, Failure> {
    match names.iter().enumerate().find(|(index, name)| names[..*index].contains(name)) {
        Some((_, twice)) => Err(Failure::usage(format!("--context {twice} is given twice"))),
        None => Ok(names.to_vec()),
    }
}

/// The facts of devices, with their names, as `--json` prints them.
#[cfg(feature = "fuse")]
pub fn json_of(devices: &[(&str, std::sync::Arc<blockhaul_block::Facts>)]) -> String {
    blockhaul_inspect::InspectionReport::of_devices(devices).json()
}

/// The property of `--can`, `--is` or `--has`.
fn ability(word: &str) -> Result<Ability, Failure> {
    Ability::parse(word).ok_or_else(|| {
        let known: Vec<_> = Ability::names().collect();
        let text =
            format!("unknown --can/--is/--has option: {word}; known are {}", known.join(", "));
        Failure::new(FAILED, text)
    })
}

struct Request {
    question: Question,
    json: bool,
    color: bool,
    timeout: Duration,
    verbose: bool,
}

impl Request {
    fn new(question: Question, json: bool, options: &args::InspectionOptions) -> Request {
        let &args::InspectionOptions { timeout, verbose, ref colors } = options;
        Request { question, json, color: colors.wanted(), timeout, verbose }
    }
}

enum Question {
    All {
        content: bool,
    },
    List {
        content: bool,
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

fn ask(request: Request, spec: blockhaul_catalog::Spec) -> Outcome {
    crate::logger::start(request.verbose);
    let timeout = request.timeout;
    let options = Options::default().connecting(&ConnectionSettings::with_timeout(timeout));
    let name = spec.to_string();
    let inspection = Inspection::new(spec, devices::registry(timeout), options)?;
    let config = blockhaul_io::Config { workers: 1, engine: Engine::Auto };
    let runtime = Runtime::start(&config).map_err(|error| {
        Failure::new(FAILED, format!("cannot start: {}", crate::exit::plain(&error)))
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
    request: Request,
) -> Result<(Output, Outcome), Failure> {
    let mut output = Output::default();
    let Request { question, json, color, .. } = request;
    match question {
        Question::All { content } => {
            let report = inspection.report(content).await?;
            output.text(&if json { report.json() } else { report.text(color) })?;
        }
        Question::List { content } => {
            let (report, failed) = inspection.list(content).await?;
            output.text(&if json { report.json() } else { report.text(color) })?;
            if let Some(failure) = failed {
                return Ok((output, Err(failure.into())));
            }
        }
        #[cfg(feature = "formats")]
        Question::QemuList => {
            let (report, failed) = inspection.list(false).await?;
            if let Some(failure) = failed {
                return Err(failure.into());
            }
            output.text(&report.qemu_list())?;
        }
        Question::Size => output.text(&format!("{}\n", inspection.report(false).await?.size()))?,
        Question::Uri { json } => {
            let uri = inspection.uri().await?.ok_or_else(|| {
                let why = "has no URI: use --uri with a server that has an address";
                Failure::new(FAILED, format!("{name} {why}"))
            })?;
            let uri = if json { serde_json::Value::from(uri).to_string() } else { uri };
            output.text(&format!("{uri}\n"))?;
        }
        Question::Can(ability, wanted) => {
            let report = if ability.is_of_server() {
                inspection.server().await?
            } else {
                inspection.report(false).await?
            };
            let able = ability.is_in(&report);
            return Ok((output, Ok(if able == wanted { 0 } else { NO })));
        }
        Question::Map(contexts, options, svg) => {
            let (device, contexts) = inspection.device_with_contexts(&contexts).await?;
            let map = blockhaul_inspect::write_map(&device, contexts, &options, output).await?;
            let pictures;
            (output, pictures) = map;
            output.text(&pictures.strips(options.color))?;
            write_svg(&pictures, svg.as_deref())?;
        }
        Question::Dump(offset, length) => {
            let device = inspection.device().await?;
            blockhaul_inspect::write_dump(&device, (offset, length), color, &mut output).await?;
        }
    }
    Ok((output, Ok(0)))
}

/// Writes the image of a map.
fn write_svg(pictures: &MapPictures, path: Option<&Path>) -> Result<(), Failure> {
    let Some(path) = path else { return Ok(()) };
    std::fs::write(path, pictures.svg()).map_err(|error| {
        let text = format!("cannot write {}: {}", path.display(), crate::exit::plain(&error));
        Failure::new(FAILED, text)
    })
}

impl From<InspectionError> for Failure {
    fn from(error: InspectionError) -> Failure {
        match error {
            InspectionError::Open { device, error } => Failure::opening("device", &device, &error),
            InspectionError::Context { .. } => {
                Error::new(Kind::Unsupported, format!("--map: {error}")).into()
            }
            InspectionError::QemuContexts => {
                Failure::usage(format!("--format qemu shows {BASE_ALLOCATION} only"))
            }
            InspectionError::Range { .. } => Failure::usage(format!("--{error}")),
            InspectionError::Device(error) => error.into(),
            InspectionError::Output(error) => crate::out::failed(&error),
            InspectionError::Export { .. } => Failure::new(FAILED, error.to_string()),
        }
    }
}
