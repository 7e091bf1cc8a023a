//! `nbdcopy`: its command line, carried out by `blockhaul copy`.

mod end;
mod facts;
mod settings;

use std::ffi::OsString;

use self::end::{End, Role};
use self::facts::Facts;
use self::settings::{OPTIONS, Settings};
use super::options;
use super::stand_in::{answer, failure, log_as, own, version};
use crate::args::Command;
use crate::brackets;
use crate::exit::{FAILED, Failure, Outcome, plain};
use crate::{copy, out, signals};

const HELP: &str = "\
Copies from and to NBD servers and files.

    nbdcopy [OPTIONS] SOURCE DESTINATION

This is blockhaul in the place of libnbd's nbdcopy.

    SOURCE, DESTINATION     - (a pipe), a file, a block device, an NBD URI, [ CMD ARG... ]
    DESTINATION             also null:

    --allocated             make no holes
    -C, --connections=N     connections to each side (4)
    --destination-is-zero, --target-is-zero
                            the destination reads as zeroes already
    --flush                 make the destination durable before ending
    --no-extents            do not ask the source where its holes are
    -p, --progress[=FD]     show a bar, or print N/100 to a descriptor
    --queue-size=SIZE       bytes in flight on each connection (16M)
    --request-size=SIZE     bytes of a request (256K)
    -R, --requests=N        requests in flight on each connection, at most (64)
    -S, --sparse=SIZE       zeroes from this length on become holes; 0 to not look (4K)
    --synchronous           one request at a time, in order
    -T, --threads=N         threads, and connections at most; 0 for one per core
    -v, --verbose           say what is going on
    -V, --version           the version of nbdcopy that this one follows

`blockhaul copy --help` tells of what else can be done.
";

/// Runs nbdcopy with these words.
pub fn run(words: &[OsString]) -> Outcome {
    let (words, groups) = brackets::take(words.to_vec()).map_err(failure)?;
    let parts = options::parse(OPTIONS, &words)
        .map_err(|text| failure(format!("{text}; see nbdcopy --help")))?;
    let mut settings = Settings::default();
    for (means, value) in parts.options {
        match means {
            "help" => return answer(HELP),
            "version" => return answer(&version("nbdcopy")),
            "long-options" => return answer(&options::long_list(OPTIONS)),
            "short-options" => return answer(&options::short_list(OPTIONS)),
            _ => settings.set(means, value).map_err(failure)?,
        }
    }
    let [source, target] = &parts.operands[..] else {
        return Err(failure("give a SOURCE and a DESTINATION; see nbdcopy --help"));
    };
    let source = End::new(source, &groups, Role::Source)?;
    let target = End::new(target, &groups, Role::Target)?;
    carry_out(&settings, source, target).map_err(|failure: Failure| match failure.status() {
        // Like a shell for a program that was ended by a signal.
        128.. => failure,
        _ => failure.with_status(FAILED),
    })
}

fn carry_out(settings: &Settings, source: End, target: End) -> Outcome {
    log_as("nbdcopy", settings.has("verbose"));
    let piped = source.is_pipe() || target.is_pipe();
    let mut started = Vec::new();
    let (mut source, mut target) = (source, target);
    if settings.has("verbose") {
        let facts = Facts::of(&mut source, &mut started);
        let size = facts.size;
        out::error(&facts.lines("src"));
        let mut facts = Facts::of(&mut target, &mut started);
        if matches!(target, End::Storage(_)) {
            // A file is made as large as the source.
            facts.size = size;
        }
        out::error(&facts.lines("dst"));
        out::error(&settings.line(piped));
    }
    source.take_place(Role::Source)?;
    target.take_place(Role::Target)?;
    if source.is_pipe() && target.is_pipe() {
        return pour();
    }
    let mut words: Vec<OsString> = vec!["blockhaul".into(), "copy".into()];
    words.extend(settings.words(&target));
    words.push("--".into());
    // Here a copy onto itself is refused, as it is hardly ever intended. nbdcopy allows it, so the
    // target gets another path.
    let same = matches!((&source, &target), (End::Server(one), End::Server(other)) if one == other);
    words.extend(source.words(false));
    if same {
        words.extend(["[", "blockhaul", "serve", "-f"].map(OsString::from));
        words.extend(target.words(false));
        words.push("]".into());
    } else {
        words.extend(target.words(source.is_pipe()));
    }
    let (cli, groups) = own(words)?;
    let Command::Copy(args) = cli.command else {
        return Err(failure("the command line was not understood"));
    };
    let outcome = copy::run(&args, &groups);
    // Servers that were started here end here.
    drop(started);
    outcome
}

/// Copies standard input to standard output.
fn pour() -> Outcome {
    let copied = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::stdout().lock());
    match copied {
        Ok(_) => Ok(0),
        // The reader has closed the pipe, for a reason that only it knows.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
            Ok(signals::status(signal_hook::consts::SIGPIPE))
        }
        Err(error) => {
            let text = format!("cannot copy standard input to output: {}", plain(&error));
            Err(failure(text))
        }
    }
}
