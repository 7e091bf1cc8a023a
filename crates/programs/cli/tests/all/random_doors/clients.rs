//! Clients of the doors, and what they have in flight.

use std::path::Path;

use blockhaul_testkit::history::History;
use blockhaul_testkit::peer::Conversation;
use blockhaul_testkit::rng::Rng;
use blockhaul_wire::request::RequestHeader;
use blockhaul_wire::{CommandCode, CommandFlags, ReplyForm};

use super::files::{Form, SIZE};
use super::rules::Use;

/// `NBD_FLAG_READ_ONLY`.
const READ_ONLY: u16 = 2;

/// A device that the server has open.
pub struct Door {
    /// Of the export or node; with a path in the export `d`.
    pub name: String,
    pub owner: Owner,
    pub file: usize,
    pub form: Form,
    pub usage: Use,
    pub clients: Vec<Conversation>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    Export,
    Node,
    /// A client of the export of a directory.
    Directory,
}

/// A request in flight.
pub struct RequestInFlight {
    pub client: usize,
    header: RequestHeader,
    /// What it writes.
    pub bytes: Vec<u8>,
}

impl RequestInFlight {
    pub fn at(&self) -> u64 {
        self.header.offset
    }

    pub fn is_trim(&self) -> bool {
        self.header.command == CommandCode::Trim
    }
}

impl Door {
    pub fn label(&self) -> String {
        match self.owner {
            Owner::Export => format!("export {:?}", self.name),
            Owner::Node => format!("node {:?}", self.name),
            // Each name of a file is an owner of it.
            Owner::Directory => format!("{:?} of the directory", self.name),
        }
    }

    /// Whether clients change the disk of its file.
    pub fn is_written(&self) -> bool {
        self.usage.writes() && self.form == Form::Own && self.owner != Owner::Node
    }

    /// A further client; whether it may write, or why it is refused.
    pub fn connect(&mut self, socket: &Path, rng: &mut Rng) -> Result<bool, String> {
        let mut client = Conversation::connect(socket)?;
        let replies = *rng.pick(&[ReplyForm::Simple, ReplyForm::Structured, ReplyForm::Extended]);
        let exported = client.open(&self.name, replies)?;
        if self.form == Form::Own {
            assert_eq!(exported.size, SIZE as u64, "size of {}", self.name);
        }
        self.clients.push(client);
        Ok(exported.flags & READ_ONLY == 0)
    }

    /// The bytes of a part.
    pub fn read(&mut self, client: usize, at: u64, len: usize) -> Vec<u8> {
        let read = self.clients[client].read(at, len);
        read.unwrap_or_else(|why| panic!("{}: cannot read {len} bytes at {at}: {why}", self.name))
    }

    /// The whole disk.
    pub fn read_all(&mut self) -> Vec<u8> {
        self.read(0, 0, SIZE)
    }

    /// Each client sends a request that changes the disk; they do not overlap.
    pub fn send_changes(
        &mut self,
        rng: &mut Rng,
        history: &mut History,
        trims: bool,
    ) -> Vec<RequestInFlight> {
        let mut flying: Vec<RequestInFlight> = Vec::new();
        for client in 0..self.clients.len() {
            let at = rng.below(SIZE as u64 / 512) * 512;
            let most = *rng.pick(&[1, 8, 40, 200]);
            let len = (rng.between(1, most) * 512).min(SIZE as u64 - at);
            let is_free =
                |one: &RequestInFlight| at + len <= one.at() || one.at() + one.header.length <= at;
            if !flying.iter().all(is_free) {
                continue;
            }
            let kind = *rng.pick(&[
                CommandCode::Write,
                CommandCode::Write,
                CommandCode::Write,
                CommandCode::WriteZeroes,
                CommandCode::Trim,
            ]);
            let kind = if trims || kind != CommandCode::Trim { kind } else { CommandCode::Write };
            let mut header = self.clients[client].request(kind, at, len);
            let mut bytes = vec![0; len as usize];
            let mut payload: &[u8] = &[];
            if kind == CommandCode::Write {
                rng.fill(&mut bytes);
                payload = &bytes;
            }
            if kind == CommandCode::WriteZeroes && rng.chance(50) {
                header.flags |= CommandFlags::NO_HOLE;
            }
            if rng.chance(10) {
                header.flags |= CommandFlags::FUA;
            }
            history.begun(at, &bytes);
            self.clients[client].send_request(&header, payload).unwrap();
            flying.push(RequestInFlight { client, header, bytes });
        }
        flying
    }

    /// Receives the replies.
    pub fn finish(&mut self, flying: Vec<RequestInFlight>, history: &mut History) {
        for one in &flying {
            let answer = self.clients[one.client].receive_answer(&one.header);
            let what = || format!("{}: {:?} at {}", self.name, one.header.command, one.at());
            let answer = answer.unwrap_or_else(|why| panic!("{}: {why}", what()));
            assert_eq!(answer.error, 0, "{}: {}", what(), answer.text);
            history.done(one.at(), one.bytes.len());
            if one.header.flags.contains(CommandFlags::FUA) {
                history.flushed_part(one.at(), one.bytes.len());
            }
        }
        // Trimmed contents are undefined, but do not change.
        for one in flying.iter().filter(|one| one.is_trim()) {
            let found = self.read(one.client, one.at(), one.bytes.len());
            history.begun(one.at(), &found);
            history.done(one.at(), found.len());
        }
    }

    /// Flushes over one of the connections, with other requests in flight.
    pub fn flush(&mut self, rng: &mut Rng, history: &mut History) {
        let flusher = rng.below(self.clients.len() as u64) as usize;
        let header = self.clients[flusher].request(CommandCode::Flush, 0, 0);
        self.clients[flusher].send_request(&header, &[]).unwrap();
        let answer = self.clients[flusher].receive_answer(&header).unwrap();
        assert_eq!(answer.error, 0, "{}: flush: {}", self.name, answer.text);
        history.flushed();
    }

    /// A part of the disk is what its clients have made of it.
    pub fn verify(&mut self, rng: &mut Rng, history: &History) {
        let at = rng.below(SIZE as u64);
        let len = rng.between(1, (SIZE as u64 - at).min(200_000)) as usize;
        let client = rng.below(self.clients.len() as u64) as usize;
        let found = self.read(client, at, len);
        let wanted = history.latest(at, len);
        assert_same(&found, &wanted, || format!("{} at {at}", self.name));
    }
}

/// Panics at the first byte that differs.
#[track_caller]
pub fn assert_same(found: &[u8], wanted: &[u8], what: impl Fn() -> String) {
    assert_eq!(found.len(), wanted.len(), "{}", what());
    if found != wanted {
        let differ = |at: &usize| found[*at] != wanted[*at];
        let first = (0..found.len()).find(differ).unwrap();
        let count = (0..found.len()).filter(differ).count();
        let shown = |bytes: &[u8]| bytes[first..bytes.len().min(first + 8)].to_vec();
        panic!(
            "{}: {count} of {} bytes differ, the first after {first}: {:?}, not {:?}",
            what(),
            found.len(),
            shown(found),
            shown(wanted)
        );
    }
}
