//! `blockhaul info` and `blockhaul map`: the exact output of nbdinfo 1.22 for exports of NBD
//! servers; the same facts for all other devices.
//!
//! - `subject`: what to query: a server's exports, or one of our devices.
//! - `report`: facts as text and JSON. `map`: extents as text and JSON; `picture`: as
//!   strips and images.
//! - `dump`: contents in hexadecimal.
//! - `ability`: the words of `--can` and `--is`. `content`: a guess at a device's contents.

mod ability;
mod content;
mod dump;
mod map;
mod picture;
mod report;
mod subject;

use std::io::IsTerminal as _;
use std::time::Duration;

use blockhaul_io::{Engine, Runtime};

use crate::args;
use crate::brackets::Groups;
use crate::exit::{FAILED, Failure, Outcome};
use crate::image_format;
use crate::out::Output;
use ability::Ability;
use map::{Format, Style, View};
use subject::Subject;

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
    let color = args.colors.wanted();
    let question = match args {
        args::Info { list: true, .. } => Question::List { content: args.content },
        args::Info { size: true, .. } => Question::Size,
        args::Info { uri: true, .. } => Question::Uri { json: args.json },
        args::Info { can: Some(word), .. } => Question::Can(Ability::parse(word)?, true),
        args::Info { cannot: Some(word), .. } => Question::Can(Ability::parse(word)?, false),
        args::Info { map: Some(context), totals, .. } => {
            let style = if args.json { Style::Json } else { Style::Text };
            let format = Format { style, totals: *totals, color, streams: false };
            Question::Map(vec![context.clone()], format, View::default())
        }
        _ => Question::All { content: !args.no_content },
    };
    ask(
        Asked { question, json: args.json, color, timeout: args.timeout, verbose: args.verbose },
        image_format::chosen(groups.spec(&args.device)?, &args.image)?,
    )
}

/// Runs `blockhaul map`.
pub fn run_map(args: &args::Map, groups: &Groups) -> Outcome {
    let color = args.colors.wanted();
    let pictures = args.strip || args.svg.is_some();
    let style = match args.format.as_deref() {
        Some("json") => Style::Json,
        Some("json-lines") => Style::JsonLines,
        Some("qemu") => Style::Qemu,
        None if args.json => Style::Json,
        None if pictures && !args.totals => Style::Nothing,
        _ => Style::Text,
    };
    // A list in JSON is whole or not there.
    let streams = matches!(style, Style::Text | Style::JsonLines);
    let format = Format { style, totals: args.totals, color, streams };
    let view = View { range: args.range, strip: args.strip, svg: args.svg.clone() };
    let question = Question::Map(contexts(&args.context)?, format, view);
    ask(
        Asked { question, json: args.json, color, timeout: args.timeout, verbose: args.verbose },
        image_format::chosen(groups.spec(&args.device)?, &(&args.image).into())?,
    )
}

/// Runs nbddump.
pub fn run_dump(dump: blockhaul_command_lines::nbddump::Dump) -> Outcome {
    let blockhaul_command_lines::nbddump::Dump { spec, color, offset, length } = dump;
    let color = color.unwrap_or_else(|| std::io::stdout().is_terminal());
    let question = Question::Dump(offset, length);
    ask(Asked { question, json: false, color, timeout: DUMP_TIMEOUT, verbose: false }, spec)
}

/// Lists the exports of a server as qemu-nbd does.
#[cfg(feature = "formats")]
pub fn run_qemu_list(uri: &str) -> Outcome {
    let spec = blockhaul_catalog::Spec::parse(uri.as_ref())?;
    let question = Question::QemuList;
    ask(Asked { question, json: false, color: false, timeout: LIST_TIMEOUT, verbose: false }, spec)
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
    subject::report_of(devices).show(true, false)
}

struct Asked {
    question: Question,
    json: bool,
    color: bool,
    timeout: Duration,
    verbose: bool,
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
    Map(Vec<String>, Format, View),
    Dump(u64, u64),
}

fn ask(asked: Asked, spec: blockhaul_catalog::Spec) -> Outcome {
    crate::logger::start(asked.verbose);
    let subject = Subject::new(spec, asked.timeout)?;
    let config = blockhaul_io::Config { workers: 1, engine: Engine::Auto };
    let runtime = Runtime::start(&config).map_err(|error| {
        Failure::new(FAILED, format!("cannot start: {}", crate::exit::plain(&error)))
    })?;
    let (answered, subject) = runtime.block_on(move || async move {
        let answered = answer(&subject, asked).await;
        (answered, subject)
    });
    // Not on a worker: this waits for the server of `[ CMD ]`, which ends when the worker has
    // closed its connections.
    drop(subject);
    let (output, status) = answered?;
    output.finish()?;
    status
}

/// The output, and the exit status after it.
async fn answer(subject: &Subject, asked: Asked) -> Result<(Output, Outcome), Failure> {
    let mut output = Output::default();
    let Asked { question, json, color, .. } = asked;
    match question {
        Question::All { content } => {
            let report = subject.report(content).await?;
            output.text(&report.show(json, color))?;
        }
        Question::List { content } => {
            let (report, failed) = subject.list(content).await?;
            output.text(&report.show(json, color))?;
            if let Some(failure) = failed {
                return Ok((output, Err(failure)));
            }
        }
        #[cfg(feature = "formats")]
        Question::QemuList => {
            let (report, failed) = subject.list(false).await?;
            if let Some(failure) = failed {
                return Err(failure);
            }
            output.text(&report.as_qemu())?;
        }
        Question::Size => output.text(&format!("{}\n", subject.report(false).await?.size()))?,
        Question::Uri { json } => {
            let uri = subject.uri().await?;
            output.text(&if json {
                format!("{}\n", report::quoted(&uri))
            } else {
                format!("{uri}\n")
            })?;
        }
        Question::Can(ability, wanted) => {
            let report = if ability.is_of_the_server() {
                subject.head().await?
            } else {
                subject.report(false).await?
            };
            let able = ability.of(&report);
            return Ok((output, Ok(if able == wanted { 0 } else { NO })));
        }
        Question::Map(contexts, format, view) => {
            let (device, shown) = subject.device(&contexts).await?;
            map::show(&device, shown, format, &view, &mut output).await?;
        }
        Question::Dump(offset, length) => {
            let device = subject.contents().await?;
            dump::show(&device, (offset, length), color, &mut output).await?;
        }
    }
    Ok((output, Ok(0)))
}
