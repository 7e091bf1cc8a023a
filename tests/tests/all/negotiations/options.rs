//! Random options, with what each of them means by the protocol document.

use blockhaul_testkit::rng::Rng;
use blockhaul_wire::magic;

/// What an option says; what is malformed says nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Meaning {
    List,
    StructuredReply,
    ExtendedHeaders,
    StartTls,
    Info { go: bool, name: Vec<u8>, wants: Vec<u16> },
    Contexts { set: bool, name: Vec<u8>, queries: Vec<Vec<u8>> },
    ExportName(Vec<u8>),
    Abort,
    Unknown,
    Malformed,
}

/// An option as it is sent.
#[derive(Debug, Clone)]
pub struct Ask {
    pub code: u32,
    pub payload: Vec<u8>,
    pub meaning: Meaning,
}

/// Names that are asked for: those of exports, and wrong ones.
const NAMES: [&[u8]; 9] =
    [b"disk", b"disk", b"disk", b"disk", b"ro", b"", b"nosuch", b"di\0sk", b"\xff\xfe"];

const QUERIES: [&[u8]; 9] = [
    b"base:allocation",
    b"base:allocation",
    b"base:allocation",
    b"base:",
    b"",
    b"base:nosuch",
    b"x-nosuch:",
    b"qemu:allocation-depth",
    b"no colon",
];

impl Ask {
    /// A random one.
    pub fn random(rng: &mut Rng) -> Ask {
        let (code, meaning, payload) = match rng.below(100) {
            0..10 => (magic::OPT_LIST, Meaning::List, vec![]),
            10..25 => (magic::OPT_STRUCTURED_REPLY, Meaning::StructuredReply, vec![]),
            25..33 => (magic::OPT_EXTENDED_HEADERS, Meaning::ExtendedHeaders, vec![]),
            33..38 => (magic::OPT_STARTTLS, Meaning::StartTls, vec![]),
            38..52 => info(false, rng),
            52..58 => info(true, rng),
            58..68 => contexts(false, rng),
            68..84 => contexts(true, rng),
            84..93 => unknown(rng),
            93..98 => return Ask::wrong_length(rng),
            98 => {
                let name = name(rng);
                (magic::OPT_EXPORT_NAME, Meaning::ExportName(name.clone()), name)
            }
            _ => (magic::OPT_ABORT, Meaning::Abort, noise(rng, 40)),
        };
        Ask { code, payload, meaning }
    }

    /// The option that begins transmission, of an export that is there.
    pub fn last(rng: &mut Rng) -> Ask {
        let name = rng.pick(&[&b"disk"[..], b"disk", b"disk", b"ro", b""]).to_vec();
        if rng.chance(10) {
            let meaning = Meaning::ExportName(name.clone());
            return Ask { code: magic::OPT_EXPORT_NAME, payload: name, meaning };
        }
        let payload = [&counted(&name)[..], &[0, 1, 0, 3]].concat();
        let meaning = Meaning::Info { go: true, name, wants: vec![magic::INFO_BLOCK_SIZE] };
        Ask { code: magic::OPT_GO, payload, meaning }
    }

    /// One whose length or inner lengths are wrong.
    fn wrong_length(rng: &mut Rng) -> Ask {
        let plain = [
            magic::OPT_LIST,
            magic::OPT_STRUCTURED_REPLY,
            magic::OPT_EXTENDED_HEADERS,
            magic::OPT_STARTTLS,
        ];
        let (code, payload) = match rng.below(3) {
            0 => (*rng.pick(&plain), [vec![7], noise(rng, 30)].concat()),
            1 => {
                let (code, _, payload) = info(rng.chance(50), rng);
                (code, broken(payload, rng))
            }
            _ => {
                let (code, _, payload) = contexts(rng.chance(50), rng);
                (code, broken(payload, rng))
            }
        };
        Ask { code, payload, meaning: Meaning::Malformed }
    }

    /// What kind of option this is, for counting.
    pub fn label(&self) -> String {
        let name = |name: &[u8]| match name.len() {
            0..20 => format!("{:?}", String::from_utf8_lossy(name)),
            len => format!("a name of {len} bytes"),
        };
        match &self.meaning {
            Meaning::Info { go, name: of, wants } => {
                let option = if *go { "GO" } else { "INFO" };
                format!("{option} {} for {wants:?}", name(of))
            }
            Meaning::Contexts { set, name: of, queries } => {
                let option = if *set { "SET" } else { "LIST" };
                let queries: Vec<_> =
                    queries.iter().map(|query| String::from_utf8_lossy(query)).collect();
                format!("{option}_META_CONTEXT {} {queries:?}", name(of))
            }
            Meaning::ExportName(of) => format!("EXPORT_NAME {}", name(of)),
            Meaning::Unknown if self.code != magic::OPT_PEEK_EXPORT => "unknown option".to_string(),
            Meaning::Malformed => format!("option {} of a wrong length", self.code),
            meaning => format!("{meaning:?}"),
        }
    }
}

/// A string with its length before it.
fn counted(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text].concat()
}

fn noise(rng: &mut Rng, most: u64) -> Vec<u8> {
    let mut bytes = vec![0; rng.below(most + 1) as usize];
    rng.fill(&mut bytes);
    bytes
}

fn name(rng: &mut Rng) -> Vec<u8> {
    match rng.below(20) {
        0 => vec![b'n'; 4096],
        1 => vec![b'n'; 4097],
        _ => rng.pick(&NAMES).to_vec(),
    }
}

fn info(go: bool, rng: &mut Rng) -> (u32, Meaning, Vec<u8>) {
    let name = name(rng);
    let count = *rng.pick(&[0, 1, 1, 2, 3, 5]);
    let wants: Vec<u16> =
        (0..count).map(|_| *rng.pick(&[0, 1, 2, 3, 3, 4, 999, u16::MAX])).collect();
    let mut payload = counted(&name);
    payload.extend((wants.len() as u16).to_be_bytes());
    wants.iter().for_each(|want| payload.extend(want.to_be_bytes()));
    let code = if go { magic::OPT_GO } else { magic::OPT_INFO };
    (code, Meaning::Info { go, name, wants }, payload)
}

fn contexts(set: bool, rng: &mut Rng) -> (u32, Meaning, Vec<u8>) {
    let name = name(rng);
    let count = *rng.pick(&[0, 1, 1, 1, 2, 3, 9]);
    let queries: Vec<_> = (0..count).map(|_| rng.pick(&QUERIES).to_vec()).collect();
    let mut payload = counted(&name);
    payload.extend((queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| payload.extend(counted(query)));
    let code = if set { magic::OPT_SET_META_CONTEXT } else { magic::OPT_LIST_META_CONTEXT };
    (code, Meaning::Contexts { set, name, queries }, payload)
}

fn unknown(rng: &mut Rng) -> (u32, Meaning, Vec<u8>) {
    let code = *rng.pick(&[0, magic::OPT_PEEK_EXPORT, 12, 100, u32::MAX]);
    let most = *rng.pick(&[0, 10, 300, 5000, 200_000]);
    (code, Meaning::Unknown, noise(rng, most))
}

/// Inner lengths that do not make the outer one.
fn broken(mut payload: Vec<u8>, rng: &mut Rng) -> Vec<u8> {
    match rng.below(4) {
        0 => payload.push(0),
        1 => payload.truncate(rng.below(payload.len() as u64) as usize),
        2 => payload[..4].fill(0xff),
        _ => payload = noise(rng, 3),
    }
    payload
}
