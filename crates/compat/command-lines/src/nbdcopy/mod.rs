//! The command line of nbdcopy as that of `blockhaul copy`.

mod end;
mod facts;
mod settings;

use std::ffi::OsString;
use std::sync::Arc;

use blockhaul_catalog::brackets;
use blockhaul_client::ServerProcess;

use self::end::{CopyEndpoint, Role};
use self::facts::EndpointFacts;
use self::settings::{OPTIONS, Settings};
use crate::{ToolInvocation, common, getopt, words};

const HELP: &str = "\
Copies from and to NBD servers and files.

    nbdcopy [OPTIONS] SOURCE DESTINATION

This is blockhaul, with the command line of libnbd's nbdcopy.

    SOURCE, DESTINATION     - (a pipe), a file, a block device, an NBD URI, [ CMD ARG... ]
    DESTINATION             also null:

    --allocated             do not create holes
    -C, --connections=N     connections to each side (4)
    --blkhash[=sha256/64k]  print the blkhash of the disk
    --blkhash-file=FILE     print it there
    --destination-is-zero, --target-is-zero
                            assume that the destination reads as zeroes
    --flush                 flush the destination before exiting
    --no-extents            do not ask the source for its extents
    -p, --progress[=FD]     show a bar, or print N/100 to a descriptor
    --queue-size=SIZE       bytes in flight on each connection (16M)
    --request-size=SIZE     bytes of a request (256K)
    -R, --requests=N        maximum requests in flight on each connection (64)
    -S, --sparse=SIZE       turn zeroes of this length into holes; 0: off (4K)
    --synchronous           one request at a time, in order
    -T, --threads=N         threads, and maximum connections; 0: one per core
    -v, --verbose           print more detail
    -V, --version           print the version of nbdcopy that this implements

See `blockhaul copy --help` for further options.
";

/// A copy that nbdcopy's command line asks for.
#[derive(Debug)]
pub struct NbdcopyRequest {
    settings: Settings,
    source: CopyEndpoint,
    target: CopyEndpoint,
}

/// Parses nbdcopy's command line.
pub fn parse(line: &[OsString]) -> Result<ToolInvocation<NbdcopyRequest>, String> {
    let (line, groups) = brackets::take(line.to_vec())?;
    let parts =
        getopt::parse(OPTIONS, &line).map_err(|text| format!("{text}; see nbdcopy --help"))?;
    let mut settings = Settings::default();
    for (means, value) in parts.options {
        if let Some(text) = common(means, "nbdcopy", HELP, OPTIONS) {
            return Ok(ToolInvocation::Text(text));
        }
        settings.set(means, value)?;
    }
    let [source, target] = &parts.operands[..] else {
        return Err("give a SOURCE and a DESTINATION; see nbdcopy --help".to_string());
    };
    let source = CopyEndpoint::new(source, &groups, Role::Source)?;
    let target = CopyEndpoint::new(target, &groups, Role::Target)?;
    Ok(ToolInvocation::Run(NbdcopyRequest { settings, source, target }))
}

impl NbdcopyRequest {
    /// Whether `--verbose` was given.
    pub fn is_verbose(&self) -> bool {
        self.settings.has("verbose")
    }

    /// What `--verbose` prints about both sides before the copy, and the servers of `[ CMD … ]`
    /// that were started to find it out; the copy uses them, and they end when dropped.
    pub fn described(&mut self) -> (String, Vec<Arc<ServerProcess>>) {
        let piped = self.source.is_pipe() || self.target.is_pipe();
        let mut started = Vec::new();
        let source = EndpointFacts::of(&mut self.source, &mut started);
        let mut target = EndpointFacts::of(&mut self.target, &mut started);
        if matches!(self.target, CopyEndpoint::Storage(_)) {
            // A file is made as large as the source.
            target.size = source.size;
        }
        let text = source.lines("src") + &target.lines("dst") + &self.settings.line(piped);
        (text, started)
    }

    /// Whether the digest of the disk is printed, and the file for it, in the place of standard output.
    pub fn digest(&self) -> Option<Option<&str>> {
        self.settings.has("blkhash").then(|| self.settings.digest_file())
    }

    /// Puts streams with a path in the place of standard input and output.
    pub fn take_places(&mut self) -> Result<(), String> {
        self.source.take_place(Role::Source)?;
        self.target.take_place(Role::Target)
    }

    /// Whether both sides are streams, whose bytes pass in order.
    pub fn is_stream(&self) -> bool {
        self.source.is_pipe() && self.target.is_pipe()
    }

    /// The words of `blockhaul copy`.
    pub fn words(&self) -> Vec<OsString> {
        let NbdcopyRequest { settings, source, target } = self;
        let mut all = words(&["blockhaul", "copy"]);
        all.extend(settings.words(target));
        all.push("--".into());
        all.extend(source.words(false));
        // blockhaul copy refuses a copy onto itself, as it is hardly ever intended. nbdcopy allows
        // it, so the target gets another path.
        match (source, target) {
            (CopyEndpoint::Server(one), CopyEndpoint::Server(other)) if one == other => {
                all.extend(words(&["[", "blockhaul", "serve", "-f"]));
                all.extend(target.words(false));
                all.push("]".into());
            }
            _ => all.extend(target.words(source.is_pipe())),
        }
        all
    }
}
