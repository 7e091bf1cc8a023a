//! What the protocol document allows a server to answer to an option, in the state that the options
//! before it have made.

use blockhaul_testkit::peer::OptionReply;
use blockhaul_wire::{ReplyForm, magic};

use super::options::{Ask, Meaning};
use super::{SIZE, ask};

/// Names of exports and whether they are for reading only. The empty name selects the first.
const EXPORTS: [(&[u8], bool); 2] = [(b"disk", false), (b"ro", true)];
const CONTEXT: &[u8] = b"base:allocation";

/// Flags of an export.
pub const HAS_FLAGS: u16 = 1;
pub const READ_ONLY: u16 = 1 << 1;
pub const DF: u16 = 1 << 7;
pub const PAYLOAD: u16 = 1 << 12;

/// What came of an option.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Came {
    Replies(Vec<OptionReply>),
    /// The answer to EXPORT_NAME: size, flags, whether there were zeroes behind them.
    Export(u64, u16, bool),
    /// The server has hung up, or said what makes no sense.
    Nothing(String),
}

impl Came {
    /// In short, for comparing.
    pub fn label(&self) -> String {
        match self {
            Came::Replies(replies) => {
                let kinds: Vec<_> = replies.iter().map(kind).collect();
                kinds.join(" ")
            }
            Came::Export(..) => "size and flags".to_string(),
            Came::Nothing(_) => "hung up".to_string(),
        }
    }
}

fn kind(reply: &OptionReply) -> String {
    match (reply.kind, reply.payload.as_slice()) {
        (magic::REP_ACK, _) => "ACK".to_string(),
        (magic::REP_SERVER, _) => "SERVER".to_string(),
        (magic::REP_INFO, [_, kind, ..]) => format!("INFO-{kind}"),
        (magic::REP_META_CONTEXT, _) => "CONTEXT".to_string(),
        (kind, _) => format!("error {}", kind & !magic::REP_ERROR_BIT),
    }
}

/// What has been negotiated.
#[derive(Debug, Clone)]
pub struct State {
    pub replies: ReplyForm,
    /// The export for which contexts are selected, and their numbers.
    selected: Option<(Vec<u8>, Vec<u32>)>,
    no_zeroes: bool,
    /// Flags of the export, once it is chosen.
    pub chosen: Option<u16>,
    /// The numbers of contexts that hold for it.
    pub contexts: Vec<u32>,
    /// No more options may follow.
    pub over: bool,
}

impl State {
    pub fn new(no_zeroes: bool) -> State {
        State {
            replies: ReplyForm::Simple,
            selected: None,
            no_zeroes,
            chosen: None,
            contexts: Vec::new(),
            over: false,
        }
    }

    /// Notes what an option has changed, whether it may be or not.
    pub fn note(&mut self, ask: &Ask, came: &Came) {
        let replies = match came {
            Came::Nothing(_) => {
                self.over = true;
                return;
            }
            Came::Export(_, flags, _) => return self.choose(&ask.payload, *flags),
            Came::Replies(replies) => replies,
        };
        let agreed = replies.last().is_some_and(|reply| reply.kind == magic::REP_ACK);
        match &ask.meaning {
            Meaning::Abort => self.over = true,
            Meaning::StructuredReply if agreed && self.replies == ReplyForm::Simple => {
                self.replies = ReplyForm::Structured;
            }
            Meaning::ExtendedHeaders if agreed => self.replies = ReplyForm::Extended,
            Meaning::Info { go: true, name, .. } if agreed => {
                let flags = replies.iter().find_map(export);
                self.choose(name, flags.map_or(0, |(_, flags)| flags));
            }
            Meaning::Contexts { set: true, name, .. } => {
                self.selected =
                    agreed.then(|| (name.clone(), replies.iter().filter_map(id).collect()));
            }
            Meaning::Malformed if ask.code == magic::OPT_SET_META_CONTEXT => self.selected = None,
            _ => {}
        }
    }

    fn choose(&mut self, name: &[u8], flags: u16) {
        self.chosen = Some(flags);
        self.over = true;
        if let Some((of, ids)) = &self.selected
            && of == name
        {
            self.contexts.clone_from(ids);
        }
    }

    /// Whether an option may be answered so.
    pub fn judge(&self, ask: &Ask, came: &Came) -> Result<(), String> {
        let replies = match (came, &ask.meaning) {
            (Came::Replies(replies), _) => replies,
            (Came::Export(size, flags, zeroes), Meaning::ExportName(name)) => {
                ask!(self.replies != ReplyForm::Extended, "EXPORT_NAME with extended headers");
                ask!(*zeroes != self.no_zeroes, "zeroes behind the flags: {zeroes}");
                return self.judge_export(name, *size, *flags);
            }
            (Came::Nothing(_), Meaning::ExportName(name)) => {
                let impossible = self.replies == ReplyForm::Extended || known(name).is_none();
                ask!(impossible, "an export that is there was refused");
                return Ok(());
            }
            (came, _) => return Err(format!("{came:?}")),
        };
        self.judge_replies(ask, replies)
    }

    fn judge_replies(&self, ask: &Ask, replies: &[OptionReply]) -> Result<(), String> {
        for reply in replies.iter().filter(|reply| reply.is_error()) {
            ask!(replies.len() == 1, "an error behind other replies");
            ask!(std::str::from_utf8(&reply.payload).is_ok(), "an error's text is no text");
        }
        let plain = self.replies == ReplyForm::Simple;
        match &ask.meaning {
            Meaning::Malformed if ask.code == magic::OPT_STARTTLS => {
                one_of(replies, &[magic::REP_ERR_INVALID, magic::REP_ERR_UNSUP])
            }
            Meaning::Malformed => one_of(replies, &[magic::REP_ERR_INVALID]),
            Meaning::List => list(replies),
            Meaning::Abort => one_of(replies, &[magic::REP_ACK]),
            Meaning::Unknown => one_of(replies, &[magic::REP_ERR_UNSUP]),
            // None is set up here.
            Meaning::StartTls => one_of(replies, &[magic::REP_ERR_UNSUP, magic::REP_ERR_POLICY]),
            Meaning::StructuredReply => match self.replies {
                ReplyForm::Simple => one_of(replies, &[magic::REP_ACK]),
                ReplyForm::Structured => one_of(replies, &[magic::REP_ERR_INVALID]),
                ReplyForm::Extended => {
                    one_of(replies, &[magic::REP_ERR_EXT_HEADER_REQD, magic::REP_ERR_INVALID])
                }
            },
            Meaning::ExtendedHeaders if self.replies == ReplyForm::Extended => {
                one_of(replies, &[magic::REP_ERR_INVALID])
            }
            Meaning::ExtendedHeaders => one_of(replies, &[magic::REP_ACK]),
            Meaning::Contexts { .. } if plain => one_of(replies, &[magic::REP_ERR_INVALID]),
            Meaning::Info { name, .. } | Meaning::Contexts { name, .. }
                if known(name).is_none() =>
            {
                one_of(replies, refusals(name))
            }
            Meaning::Info { name, wants, .. } => self.info(name, wants, replies),
            Meaning::Contexts { set, queries, .. } => contexts(*set, queries, replies),
            Meaning::ExportName(_) => Err("EXPORT_NAME has replies".to_string()),
        }
    }

    fn info(&self, name: &[u8], wants: &[u16], replies: &[OptionReply]) -> Result<(), String> {
        let Some((last, items)) = replies.split_last() else { return Err("nothing".to_string()) };
        ask!(last.kind == magic::REP_ACK && last.payload.is_empty(), "it ends with {last:?}");
        let mut kinds = Vec::new();
        for item in items {
            ask!(item.kind == magic::REP_INFO, "{item:?} among information");
            let Some((kind, rest)) = item.payload.split_first_chunk() else {
                return Err("information without a kind".to_string());
            };
            let kind = u16::from_be_bytes(*kind);
            ask!(!kinds.contains(&kind), "kind {kind} twice");
            kinds.push(kind);
            match (kind, rest) {
                (magic::INFO_EXPORT, _) => {
                    let Some((size, flags)) = export(item) else {
                        return Err("size and flags of a wrong length".to_string());
                    };
                    self.judge_export(name, size, flags)?;
                }
                (magic::INFO_NAME, rest) => {
                    let canonical = known(name).map_or(name, |(name, _)| name);
                    ask!(rest == canonical, "the name is {rest:02x?}");
                }
                (magic::INFO_DESCRIPTION, rest) => {
                    ask!(rest == b"a disk", "the description is {rest:02x?}");
                }
                (magic::INFO_BLOCK_SIZE, rest) => block_sizes(rest)?,
                _ => return Err(format!("information of kind {kind}")),
            }
        }
        for due in [0, magic::INFO_NAME, magic::INFO_BLOCK_SIZE] {
            let due_here = due == 0 || wants.contains(&due);
            ask!(!due_here || kinds.contains(&due), "kind {due} is missing");
        }
        Ok(())
    }

    /// Size and flags of an export: the same for INFO and for GO.
    fn judge_export(&self, name: &[u8], size: u64, flags: u16) -> Result<(), String> {
        let Some((_, read_only)) = known(name) else {
            return Err("an export that is not there".to_string());
        };
        ask!(size == SIZE, "its size is {size}");
        ask!(flags & HAS_FLAGS != 0, "flags {flags:#x}");
        ask!((flags & READ_ONLY != 0) == read_only, "flags {flags:#x}");
        ask!((flags & DF != 0) == (self.replies != ReplyForm::Simple), "flags {flags:#x}");
        let selected =
            self.selected.as_ref().is_some_and(|(of, ids)| of == name && !ids.is_empty());
        let payload = self.replies == ReplyForm::Extended && selected;
        ask!((flags & PAYLOAD != 0) == payload, "flags {flags:#x}");
        // What changes is not offered for what cannot be changed; no command but these has a bit to itself.
        ask!(!read_only || flags & (1 << 5 | 1 << 6 | 1 << 11) == 0, "flags {flags:#x}");
        ask!(flags & (1 << 9 | 0b111 << 13) == 0, "flags {flags:#x}");
        Ok(())
    }
}

/// The export of a name.
fn known(name: &[u8]) -> Option<(&'static [u8], bool)> {
    match name {
        b"" => EXPORTS.first().copied(),
        name => EXPORTS.into_iter().find(|(known, _)| *known == name),
    }
}

/// How a name that is no export's may be refused.
fn refusals(name: &[u8]) -> &'static [u32] {
    let is_string = std::str::from_utf8(name).is_ok_and(|name| !name.contains('\0'));
    match is_string {
        true if name.len() <= 4096 => &[magic::REP_ERR_UNKNOWN],
        true => &[magic::REP_ERR_INVALID, magic::REP_ERR_TOO_BIG],
        false => &[magic::REP_ERR_INVALID],
    }
}

fn one_of(replies: &[OptionReply], kinds: &[u32]) -> Result<(), String> {
    let [reply] = replies else { return Err(format!("{} replies", replies.len())) };
    ask!(kinds.contains(&reply.kind), "{}", kind(reply));
    ask!(reply.is_error() || reply.payload.is_empty(), "an ACK with bytes in it");
    Ok(())
}

fn list(replies: &[OptionReply]) -> Result<(), String> {
    let mut names = Vec::new();
    let Some((last, items)) = replies.split_last() else { return Err("nothing".to_string()) };
    ask!(last.kind == magic::REP_ACK && last.payload.is_empty(), "it ends with {last:?}");
    for item in items {
        ask!(item.kind == magic::REP_SERVER, "{item:?} in a list");
        let name = item
            .payload
            .split_first_chunk()
            .and_then(|(len, rest)| rest.split_at_checked(u32::from_be_bytes(*len) as usize));
        let Some((name, description)) = name else { return Err(format!("{item:?}")) };
        let due: &[u8] = if name == b"disk" { b"a disk" } else { b"" };
        ask!(description == due, "description {description:02x?}");
        names.push(name);
    }
    ask!(names == EXPORTS.map(|(name, _)| name), "names {names:02x?}");
    Ok(())
}

/// Contexts that were found. A query that is a namespace and a colon lists all of it, but selects nothing; no
/// query lists all, but selects nothing.
fn contexts(set: bool, queries: &[Vec<u8>], replies: &[OptionReply]) -> Result<(), String> {
    let Some((last, items)) = replies.split_last() else { return Err("nothing".to_string()) };
    ask!(last.kind == magic::REP_ACK && last.payload.is_empty(), "it ends with {last:?}");
    let matches = |query: &Vec<u8>| query == CONTEXT || (!set && query == b"base:");
    let found = queries.iter().any(matches) || (!set && queries.is_empty());
    ask!(items.len() == usize::from(found), "{} contexts", items.len());
    for item in items {
        ask!(item.kind == magic::REP_META_CONTEXT, "{item:?} among contexts");
        let name = item.payload.get(4..);
        ask!(name == Some(CONTEXT), "a context named {name:02x?}");
    }
    Ok(())
}

fn id(reply: &OptionReply) -> Option<u32> {
    let id = reply.payload.first_chunk().filter(|_| reply.kind == magic::REP_META_CONTEXT)?;
    Some(u32::from_be_bytes(*id))
}

/// Size and flags.
fn export(reply: &OptionReply) -> Option<(u64, u16)> {
    let bytes: [u8; 12] = reply.payload.as_slice().try_into().ok()?;
    let head = bytes.first_chunk::<10>()?;
    let flags = bytes.last_chunk::<2>()?;
    let size =
        head.last_chunk::<8>().filter(|_| reply.kind == magic::REP_INFO && head[..2] == [0, 0])?;
    Some((u64::from_be_bytes(*size), u16::from_be_bytes(*flags)))
}

fn block_sizes(bytes: &[u8]) -> Result<(), String> {
    ask!(bytes.len() == 12, "block sizes in {} bytes", bytes.len());
    let sizes: Vec<_> = bytes
        .chunks(4)
        .map(|size| size.iter().fold(0, |size, byte| size << 8 | u64::from(*byte)))
        .collect();
    let least = sizes[0];
    let preferred = sizes[1];
    let most = sizes[2];
    ask!(least.is_power_of_two() && least <= 65536, "block sizes {sizes:?}");
    ask!(preferred.is_power_of_two() && preferred >= least.max(512), "block sizes {sizes:?}");
    ask!(most >= preferred && (most % least == 0 || most == 0xffff_ffff), "block sizes {sizes:?}");
    Ok(())
}
