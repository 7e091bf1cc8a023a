//! One script with one server: what was said, what came, what the judge says to it.

use blockhaul_testkit::peer::{Conversation, ScriptResult};
use blockhaul_testkit::rng::Rng;
use blockhaul_wire::{ReplyForm, magic};

use super::answers::{Message, Model, Session};
use super::judge::{Came, State};
use super::options::{Ask, Meaning};
use super::requests::Request;
use super::{Place, SIZE};

/// A client's flags in the greeting: fixed newstyle, and no zeroes behind the answer to EXPORT_NAME.
const NO_ZEROES: u32 = 2;

/// What one client says.
pub struct Script {
    pub flags: u32,
    pub asks: Vec<Ask>,
    /// Where its requests come from.
    requests: Rng,
    count: u64,
}

impl Script {
    pub fn random(rng: &mut Rng) -> Script {
        let mut asks: Vec<_> = (0..rng.below(12)).map(|_| Ask::random(rng)).collect();
        asks.push(Ask::last(rng));
        let flags = if rng.chance(70) { 3 } else { 1 };
        Script { flags, asks, requests: Rng::new(rng.number()), count: rng.between(1, 25) }
    }
}

/// One step: what was asked, what came of it, whether that may be.
#[derive(Debug)]
pub struct Step {
    /// With which form of replies.
    pub replies: ReplyForm,
    pub asked: String,
    pub came: String,
    pub wrong: Option<String>,
}

/// Says all of a script to a server. An error: the conversation broke where it must not.
pub fn talk(place: &Place, script: &Script) -> Result<Vec<Step>, String> {
    let mut steps = Vec::new();
    let mut said = Vec::new();
    let mut talk = open(place, script)?;
    let mut state = State::new(script.flags & NO_ZEROES != 0);
    for ask in &script.asks {
        talk.send_option(ask.code, &ask.payload)?;
        let came = option(&mut talk, ask, script.flags);
        let judged = state.judge(ask, &came);
        let wrong = judged.err().map(|why| format!("{why}: {came:?}"));
        let replies = state.replies;
        steps.push(Step { replies, asked: ask.label(), came: came.label(), wrong });
        state.note(ask, &came);
        said.push((ask, came));
        if state.over {
            break;
        }
    }
    match state.chosen {
        Some(flags) => {
            let session = Session { replies: state.replies, flags, contexts: state.contexts };
            transmit(&mut talk, place, session, script, &mut steps)?;
        }
        // nbdkit waits for the client to do so.
        None if !place.ours => {}
        None => {
            let wrong = ended(&mut talk).err();
            let came = String::new();
            steps.push(Step { replies: state.replies, asked: "the end".to_string(), came, wrong });
        }
    }
    if place.ours {
        in_pieces(place, script, &said)?;
    }
    Ok(steps)
}

fn open(place: &Place, script: &Script) -> ScriptResult<Conversation> {
    let mut talk = Conversation::connect(place.server.socket())?;
    talk.patience(place.patience)?;
    talk.hello(script.flags)?;
    Ok(talk)
}

fn ended(talk: &mut Conversation) -> ScriptResult {
    match talk.receive(1) {
        Err(why) if why.contains("ended") || why.contains("reset") => Ok(()),
        other => Err(format!("the connection does not end: {other:?}")),
    }
}

fn option(talk: &mut Conversation, ask: &Ask, flags: u32) -> Came {
    let came = match ask.meaning {
        Meaning::ExportName(_) => export(talk, flags),
        _ => replies(talk, ask.code).map(Came::Replies),
    };
    came.unwrap_or_else(Came::Nothing)
}

fn replies(
    talk: &mut Conversation,
    code: u32,
) -> ScriptResult<Vec<blockhaul_testkit::peer::OptionReply>> {
    let mut replies = Vec::new();
    loop {
        let reply = talk.receive_option_reply(code)?;
        let is_last = reply.kind == magic::REP_ACK || reply.is_error();
        replies.push(reply);
        if is_last {
            return Ok(replies);
        }
    }
}

fn export(talk: &mut Conversation, flags: u32) -> ScriptResult<Came> {
    let size = talk.receive_u64()?;
    let of_export = talk.receive_u16()?;
    let zeroes = flags & NO_ZEROES == 0;
    if zeroes {
        talk.expect(&[0; magic::RESERVED_ZEROES])?;
    }
    Ok(Came::Export(size, of_export, zeroes))
}

/// The same options once more, in pieces that end anywhere and do not wait for answers, are answered
/// the same.
fn in_pieces(place: &Place, script: &Script, said: &[(&Ask, Came)]) -> Result<(), String> {
    let mut bytes = Vec::new();
    for (ask, _) in said {
        bytes.extend(magic::IHAVEOPT.to_be_bytes());
        bytes.extend(ask.code.to_be_bytes());
        bytes.extend((ask.payload.len() as u32).to_be_bytes());
        bytes.extend(&ask.payload);
    }
    let mut talk = open(place, script)?;
    let mut rng = script.requests.clone();
    let mut rest = bytes.as_slice();
    while !rest.is_empty() {
        let most = *rng.pick(&[1, 20, 100, 100_000]);
        let (piece, left) = rest.split_at(rng.between(1, most).min(rest.len() as u64) as usize);
        // It may have hung up already, as it should.
        if talk.send(piece).is_err() {
            break;
        }
        rest = left;
    }
    for (ask, due) in said {
        let came = option(&mut talk, ask, script.flags);
        let hung_up = matches!((&came, due), (Came::Nothing(_), Came::Nothing(_)));
        if !hung_up && came != *due {
            return Err(format!("in pieces {}: {came:?} instead of {due:?}", ask.label()));
        }
    }
    Ok(())
}

fn transmit(
    talk: &mut Conversation,
    place: &Place,
    session: Session,
    script: &Script,
    steps: &mut Vec<Step>,
) -> Result<(), String> {
    let mut rng = script.requests.clone();
    let mut model = Model { bytes: place.content.clone() };
    let replies = session.replies;
    for cookie in 0..script.count {
        // Each from a seed of its own: one server's form of messages does not change another's requests.
        let request = Request::random(&mut Rng::new(rng.number()), cookie, replies);
        let messages = ask(talk, &request, replies);
        let asked = request.label();
        let Ok(messages) = messages else {
            let wrong = messages.err().map(|why| format!("{why}, for {request:?}"));
            let came = "hung up".to_string();
            steps.push(Step { replies, asked, came, wrong });
            return Ok(());
        };
        let mut judged = session.judge(&request, &messages, &mut model);
        let came = label(&messages);
        if judged.is_ok() && request.command == magic::CMD_TRIM && came == "done" {
            let now = read(talk, &request, replies)?;
            judged = model.trimmed(&request, &now);
        }
        let wrong = judged.err().map(|why| {
            let mut short = request.clone();
            short.payload.truncate(20);
            format!("{why}, for {short:?}, contexts {:?}", session.contexts)
        });
        steps.push(Step { replies, asked, came, wrong });
    }
    whole(talk, &session, &mut model, script.count, steps)?;
    let goodbye = Request {
        command: magic::CMD_DISC,
        flags: 0,
        cookie: script.count + 1,
        offset: 0,
        length: 0,
        payload: vec![],
        filter: None,
    };
    talk.send(&goodbye.bytes(replies))?;
    if place.ours { ended(talk) } else { Ok(()) }
}

/// Reads the whole disk.
fn whole(
    talk: &mut Conversation,
    session: &Session,
    model: &mut Model,
    cookie: u64,
    steps: &mut Vec<Step>,
) -> Result<(), String> {
    let request = Request {
        command: magic::CMD_READ,
        flags: 0,
        cookie,
        offset: 0,
        length: SIZE,
        payload: vec![],
        filter: None,
    };
    let messages = ask(talk, &request, session.replies)?;
    let wrong = session.judge(&request, &messages, model).err();
    let asked = "READ all".to_string();
    let came = label(&messages);
    steps.push(Step { replies: session.replies, asked, came, wrong });
    Ok(())
}

/// Reads what a request was about.
fn read(talk: &mut Conversation, of: &Request, replies: ReplyForm) -> Result<Vec<u8>, String> {
    let flags = 0;
    let cookie = of.cookie | 1 << 63;
    let request = Request { command: magic::CMD_READ, flags, cookie, ..of.clone() };
    let messages = ask(talk, &request, replies)?;
    let told = super::answers::told(&request, replies, &messages)?;
    told.bytes(&request)
}

/// Sends a request, receives all messages of its reply.
fn ask(
    talk: &mut Conversation,
    request: &Request,
    replies: ReplyForm,
) -> ScriptResult<Vec<Message>> {
    talk.send(&request.bytes(replies))?;
    let mut messages = Vec::new();
    loop {
        let (message, is_last) = message(talk, request, replies)?;
        messages.push(message);
        if is_last {
            return Ok(messages);
        }
    }
}

fn message(
    talk: &mut Conversation,
    request: &Request,
    replies: ReplyForm,
) -> ScriptResult<(Message, bool)> {
    let due = match replies {
        ReplyForm::Extended => magic::EXTENDED_REPLY,
        _ => magic::STRUCTURED_REPLY,
    };
    let found = talk.receive_u32()?;
    if found == magic::SIMPLE_REPLY {
        let error = talk.receive_u32()?;
        same(talk, "cookie", request.cookie)?;
        let brings = request.command == magic::CMD_READ && error == 0;
        let data = talk.receive(if brings { request.length as usize } else { 0 })?;
        return Ok((Message::Simple { error, data }, true));
    }
    if found != due || replies == ReplyForm::Simple {
        return Err(format!("a reply starts with {found:#x}"));
    }
    let flags = talk.receive_u16()?;
    let kind = talk.receive_u16()?;
    same(talk, "cookie", request.cookie)?;
    let length = match replies {
        ReplyForm::Extended => {
            same(talk, "offset", request.offset)?;
            talk.receive_u64()?
        }
        _ => talk.receive_u32()?.into(),
    };
    if length > 4 * SIZE {
        return Err(format!("a chunk of {length} bytes"));
    }
    let payload = talk.receive(length as usize)?;
    Ok((Message::Chunk { flags, kind, payload }, flags & 1 != 0))
}

fn same(talk: &mut Conversation, what: &str, due: u64) -> ScriptResult {
    let found = talk.receive_u64()?;
    if found == due { Ok(()) } else { Err(format!("{what} {found:#x} instead of {due:#x}")) }
}

/// An answer in short, for comparing.
fn label(messages: &[Message]) -> String {
    let error = messages.iter().find_map(|message| match message {
        Message::Simple { error, .. } => Some(*error),
        Message::Chunk { kind, payload, .. } if kind & magic::REPLY_ERROR_BIT != 0 => {
            payload.first_chunk().map(|error| u32::from_be_bytes(*error))
        }
        Message::Chunk { .. } => None,
    });
    match error {
        None | Some(0) => "done".to_string(),
        Some(error) => format!("error {error}"),
    }
}
