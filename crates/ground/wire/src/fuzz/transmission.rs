//! A driver of [`Transmission`] for tests: its bytes come from a slice, in pieces.

use crate::request::RequestHeader;
use crate::transmission::{ReadRange, ReceiveResult, Transmission, TransmissionEvent};
use crate::{CommandCode, CommandFlags, ReplyForm, RequestForm, limits, reply};

/// The memory of a read; other requests have none.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    pub(crate) bytes: Vec<u8>,
    /// How often each byte has arrived.
    times: Vec<u32>,
}

impl Memory {
    pub(crate) fn new(len: usize) -> Memory {
        Memory { bytes: vec![0xee; len], times: vec![0; len] }
    }

    fn fill(&mut self, at: u64, from: &[u8]) {
        let at = usize::try_from(at).expect("inside of the request");
        self.bytes[at..at + from.len()].copy_from_slice(from);
        self.times[at..at + from.len()].iter_mut().for_each(|times| *times += 1);
    }
}

/// The bytes of a read, the extents of each context, or an error.
pub(crate) type ReadOutcome = Result<(Vec<u8>, Vec<(u32, Vec<(u64, u64)>)>), String>;

/// All that a connection has led to.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Transcript {
    /// Requests by their cookies, in the order of their ends.
    pub(crate) ended: Vec<(u64, ReadOutcome)>,
    /// Why the connection has ended.
    pub(crate) error: Option<String>,
    /// Messages whose heads have arrived; 0 after an error.
    pub(crate) messages: u64,
}

/// Feeds `input`; `next` is the number of bytes that are there after this number of bytes.
pub(crate) fn drive(
    machine: &mut Transmission<Memory>,
    input: &[u8],
    next: impl Fn(usize) -> usize,
) -> Transcript {
    let mut transcript = Transcript::default();
    let mut used = 0;
    let mut there = next(0).min(input.len());
    loop {
        let received = match machine.receive(&input[used..there]) {
            Ok(received) => received,
            Err(error) => {
                let error = Some(error.to_string());
                return Transcript { error, messages: 0, ..transcript };
            }
        };
        let ReceiveResult { used: consumed, messages, event } = received;
        used += consumed;
        assert!(used <= there);
        transcript.messages += messages;
        let here = match event {
            TransmissionEvent::NeedMore => {
                assert!(there - used < reply::EXTENDED_LEN + reply::DATA_PREFIX_LEN);
                0
            }
            TransmissionEvent::Contents(missing) => {
                assert!(used == there && missing > 0);
                assert!(missing <= 8 + 16 * limits::EXTENTS);
                0
            }
            TransmissionEvent::Payload(ReadRange { cookie, at, len }) => {
                assert!(len > 0);
                let here = (there - used).min(usize::try_from(len).unwrap_or(usize::MAX));
                let memory = machine.get_mut(cookie).expect("a request in flight");
                memory.fill(at, &input[used..used + here]);
                machine.took(here as u64);
                used += here;
                here
            }
            TransmissionEvent::Hole(ReadRange { cookie, at, len }) => {
                let zeroes = vec![0; usize::try_from(len).expect("inside of the request")];
                machine.get_mut(cookie).expect("a request in flight").fill(at, &zeroes);
                continue;
            }
            TransmissionEvent::End { cookie, request, result } => {
                let Memory { bytes, times } = request;
                let result = result.map_err(|error| error.to_string()).map(|lists| {
                    assert!(times.iter().all(|times| *times == 1), "{times:?}");
                    let lists = lists.iter().map(|list| {
                        let status = list.status();
                        let extents = status.extents().map(|extent| (extent.len, extent.flags));
                        (status.context(), extents.collect())
                    });
                    (bytes, lists.collect())
                });
                transcript.ended.push((cookie, result));
                continue;
            }
        };
        if here == 0 {
            if there == input.len() {
                return transcript;
            }
            there = next(there).clamp(there + 1, input.len());
        }
    }
}

/// A connection with one request of each kind in flight, and their cookies.
pub(crate) fn machine(replies: ReplyForm) -> (Transmission<Memory>, Vec<u64>) {
    let headers = match replies {
        ReplyForm::Extended => RequestForm::Extended,
        ReplyForm::Simple | ReplyForm::Structured => RequestForm::Compact,
    };
    let mut machine = Transmission::new(headers, replies);
    let requests = [
        (CommandCode::Read, 4096, 64),
        (CommandCode::Read, 0, 16),
        (CommandCode::Write, 512, 512),
        (CommandCode::Flush, 0, 0),
        (CommandCode::BlockStatus, 0, 1 << 20),
    ];
    let cookies = requests.map(|(command, offset, length)| {
        let header =
            RequestHeader { flags: CommandFlags::NONE, command, cookie: 0, offset, length };
        let is_read = command == CommandCode::Read;
        let memory = Memory::new(if is_read { usize::try_from(length).expect("small") } else { 0 });
        let contexts = if command == CommandCode::BlockStatus { vec![7, 9] } else { Vec::new() };
        machine.begin(header, contexts, memory).expect("a good request").0
    });
    (machine, cookies.to_vec())
}

/// A client in transmission: the first byte chooses the form of replies, the second how the rest,
/// the server's bytes, is cut. The cuts make no difference.
pub fn fuzz_transmission(data: &[u8]) {
    let [form, step, input @ ..] = data else { return };
    let replies =
        [ReplyForm::Simple, ReplyForm::Structured, ReplyForm::Extended][usize::from(form % 3)];
    let (mut machine, cookies) = self::machine(replies);
    let whole = drive(&mut machine, input, |_| input.len());
    assert_eq!(machine.in_flight() + whole.ended.len(), cookies.len());
    assert_eq!(machine.drain().count() + whole.ended.len(), cookies.len());
    let step = usize::from(*step).max(1);
    assert_eq!(drive(&mut self::machine(replies).0, input, |there| there + step), whole);
}
