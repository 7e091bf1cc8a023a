//! `tls-fallback`: clients without TLS get a message instead of the device.

use std::sync::Arc;

use blockhaul_block::{
    Can, Device, Error, Facts, Kind, Op, PendingRequest, Reply, Request, Result,
};
use blockhaul_catalog::{
    DeviceSharing, Export, ExportClient, Gate, GateKind, ListedExport, ParamKind, ParamValues,
};

use super::rule::{ExportChoice, GateClient, GateRule, gate};
use blockhaul_layers::support::param_or;

/// The gate `tls-fallback`.
pub static TLS_FALLBACK: GateKind = GateKind {
    name: "tls-fallback",
    summary: "serves clients without TLS a message instead of the device",
    manual: "For servers with `--tls on`, where TLS is offered and not required: a client that does not use \
it sees one read-only export of 512 bytes that contains `tlsreadme`, whatever name it \
requests. So no data is sent without encryption, and the user learns the reason.",
    example: r#"
blockhaul tls init --psk alice keys.psk
blockhaul serve --tls on --tls-psk keys.psk --layer tls-fallback memory:64M \
  --run 'blockhaul info nbd+unix:///?socket=$unixsocket'
"#,
    params: &[param_or(
        "tlsreadme",
        ParamKind::Text,
        "This NBD server requires TLS authentication before it will serve useful data.\n",
        "The message, of which at most 512 bytes are served.",
    )],
    configure: |args, _| configure(args),
};

/// Size of the message's device.
const SIZE: usize = 512;

fn configure(args: &ParamValues) -> Result<Arc<dyn Gate>> {
    let mut bytes = args.text("tlsreadme").unwrap_or_default().as_bytes().to_vec();
    bytes.resize(SIZE, 0);
    let facts = Facts { can: Can::MULTI_CONN, ..Facts::new("tls-fallback", SIZE as u64) };
    let message = Arc::new(MessageDevice { facts: Arc::new(facts), bytes });
    let device = blockhaul_block::fence(blockhaul_block::emulate::emulate(message));
    let sharing = DeviceSharing::All(Arc::default());
    gate(Arc::new(FallbackRule(Export { name: String::new(), description: None, device, sharing })))
}

/// The message, under any name.
struct FallbackRule(Export);

impl GateRule for FallbackRule {
    fn admit(self: Arc<Self>, _client: &ExportClient) -> Result<Arc<dyn GateClient>> {
        Ok(self)
    }
}

impl GateClient for FallbackRule {
    fn open(&self, name: &str, tls: bool) -> Result<ExportChoice> {
        Ok(if tls {
            ExportChoice::Name(name.to_string())
        } else {
            ExportChoice::Export(Export { name: name.to_string(), ..self.0.clone() })
        })
    }

    fn list(&self, listed: Vec<ListedExport>, tls: bool) -> Result<Vec<ListedExport>> {
        let message = ListedExport { name: String::new(), description: String::new() };
        Ok(if tls { listed } else { vec![message] })
    }

    fn needs_list(&self, tls: bool) -> bool {
        tls
    }
}

struct MessageDevice {
    facts: Arc<Facts>,
    bytes: Vec<u8>,
}

impl Device for MessageDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let Op::Read(room) = request.op else {
            return Error::new(Kind::Invalid, "this export is read-only").into();
        };
        // The fence has checked the range.
        let start = usize::try_from(request.at).unwrap_or(SIZE).min(SIZE);
        let mut buf = room.into_buf();
        let len = buf.len().min(SIZE - start);
        buf[..len].copy_from_slice(&self.bytes[start..start + len]);
        PendingRequest::ready(Ok(Reply::Data(buf.into())))
    }
}
