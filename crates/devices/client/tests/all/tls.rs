//! TLS as the protocol document requires it, on real sockets: how sessions begin, fail and end.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{SIZE, content, on_worker, open, options, use_it};
use blockhaul_block::Kind;
use blockhaul_io::{Listener, Pool, Runtime, RuntimeConfig as IoConfig};
use blockhaul_server::{Limits, Offers, Server, ServerConfig, TlsPolicy};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};
use blockhaul_testkit::peer::{Conversation, ScriptedServer};
use blockhaul_testkit::tools::ScratchDir;
use blockhaul_tls::{TlsAcceptor, TlsCredentials};
use blockhaul_wire::{CommandCode, RequestForm, magic, request};
use openssl::ssl::{ErrorCode, Ssl, SslContext, SslMethod, SslStream, SslVerifyMode};

/// A key that both sides have.
const KEY: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";

struct Secured {
    server: Arc<Server>,
    scratch: ScratchDir,
    keys: PathBuf,
    /// The server ends with it.
    _runtime: Runtime,
}

/// A server that requires TLS with pre-shared keys.
fn secured() -> Secured {
    let scratch = ScratchDir::new().unwrap();
    let keys = scratch.path().join("keys.psk");
    std::fs::write(&keys, format!("alice:{KEY}\n")).unwrap();
    let acceptor = TlsAcceptor::new(&TlsCredentials::Keys(keys.clone()), false).unwrap();
    let model = Model::new(SIZE).with_content(content(0, SIZE));
    let device = blockhaul_block::fence(ModelDevice::new(model, CompletionOrder::Deferred));
    let server = Server::new(ServerConfig {
        exports: blockhaul_catalog::SharedDevice::new("", "", device),
        limits: Limits::default(),
        offers: Offers::ALL,
        pool: Pool::new(64 << 20),
        tls: TlsPolicy::Require(Arc::new(acceptor)),
    });
    let runtime = Runtime::start(&IoConfig { workers: 1, ..IoConfig::default() }).unwrap();
    let there = server.clone();
    let path = scratch.socket("server");
    runtime.block_on(move || async move {
        drop(blockhaul_io::spawn(there.listen(Listener::bind_unix(&path).unwrap())));
    });
    Secured { server, scratch, keys, _runtime: runtime }
}

impl Secured {
    /// A connection after the ACK to STARTTLS.
    fn upgraded(&self) -> Conversation {
        let mut client = Conversation::connect(&self.scratch.socket("server")).unwrap();
        client.hello(3).unwrap();
        let replies = client.option(magic::OPT_STARTTLS, &[]).unwrap();
        assert_eq!(replies[0].kind, magic::REP_ACK);
        client
    }

    fn uri(&self) -> String {
        let socket = self.scratch.socket("server");
        let keys = &self.keys;
        format!("nbds+unix://alice@/?socket={}&tls-psk-file={}", socket.display(), keys.display())
    }
}

/// OpenSSL's own client, in transmission: TLS, then EXPORT_NAME for the default export.
fn foreign(secured: &Secured) -> SslStream<UnixStream> {
    let mut plain = UnixStream::connect(secured.scratch.socket("server")).unwrap();
    plain.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let option = |code: u32| [magic::IHAVEOPT.to_be_bytes(), (u64::from(code) << 32).to_be_bytes()];
    plain.read_exact(&mut [0; 18]).unwrap();
    plain.write_all(&3_u32.to_be_bytes()).unwrap();
    plain.write_all(&option(magic::OPT_STARTTLS).concat()).unwrap();
    plain.read_exact(&mut [0; 20]).unwrap();
    let mut context = SslContext::builder(SslMethod::tls_client()).unwrap();
    context.set_verify(SslVerifyMode::NONE);
    context.set_psk_client_callback(|_, _, user, key| {
        user[..6].copy_from_slice(b"alice\0");
        (0..32_u8).for_each(|byte| key[usize::from(byte)] = byte);
        Ok(32)
    });
    let ssl = Ssl::new(&context.build()).unwrap();
    let mut stream = SslStream::new(ssl, plain).unwrap();
    stream.connect().unwrap();
    stream.write_all(&option(magic::OPT_EXPORT_NAME).concat()).unwrap();
    let mut export = [0; 10];
    stream.read_exact(&mut export).unwrap();
    assert_eq!(export[..8], SIZE.to_be_bytes());
    stream
}

// nbd: disconnect.server-closes
#[test]
fn a_disconnect_ends_tls_properly() {
    let secured = secured();
    let mut client = foreign(&secured);
    let mut requests = Vec::new();
    for (command, offset, length) in
        [(CommandCode::Read, 512, 4096), (CommandCode::Disconnect, 0, 0)]
    {
        let flags = blockhaul_wire::CommandFlags::NONE;
        let header = request::RequestHeader { flags, command, cookie: 7, offset, length };
        header.emit(RequestForm::Compact, &mut requests).unwrap();
    }
    client.write_all(&requests).unwrap();
    // The request before the disconnect is answered.
    let mut reply = vec![0; 16 + 4096];
    client.read_exact(&mut reply).unwrap();
    assert_eq!(reply[16..], content(512, 4096));
    // Then the session ends, and after it the connection.
    let error = client.ssl_read(&mut [0]).unwrap_err();
    assert_eq!(error.code(), ErrorCode::ZERO_RETURN, "{error}");
    assert_eq!(client.get_mut().read(&mut [0]).unwrap(), 0);
}

// nbd: tls.failed-server, tls.failed-client
#[test]
fn a_failed_tls_handshake_ends_the_session() {
    let secured = secured();
    let mut client = secured.upgraded();
    client.send_garbage(1, 1000).unwrap();
    client.expect_close().unwrap();
    // The same for options in plain text.
    let mut client = secured.upgraded();
    client.send_option(magic::OPT_LIST, &[]).unwrap();
    client.expect_close().unwrap();

    // A client ends the session, too.
    let server = ScriptedServer::start(|talk, _| {
        talk.greet(3)?;
        let (code, _) = talk.receive_option()?;
        if code != magic::OPT_STARTTLS {
            return Err(format!("option {code} before STARTTLS"));
        }
        talk.reply_option(code, magic::REP_ACK, &[])?;
        talk.send_garbage(2, 1000)?;
        talk.expect_close().map(drop)
    });
    let keys = secured.keys.clone();
    let socket = server.path().to_path_buf();
    let uri =
        format!("nbds+unix://alice@/?socket={}&tls-psk-file={}", socket.display(), keys.display());
    let error = on_worker(move || async move { open(&uri, options()).await.map(drop) });
    assert_ne!(error.unwrap_err().kind(), Kind::TimedOut);
    server.finish().unwrap();
}

// nbd: tls.mode-stays
#[test]
fn the_mode_of_a_connection_stays() {
    let secured = secured();
    let mut before = Conversation::connect(&secured.scratch.socket("server")).unwrap();
    before.hello(3).unwrap();
    secured.server.set_tls(TlsPolicy::Off);
    // The first connection still requires TLS, and accepts it.
    let replies = before.option(magic::OPT_LIST, &[]).unwrap();
    assert_eq!(replies[0].kind, magic::REP_ERR_TLS_REQD);
    assert_eq!(before.option(magic::OPT_STARTTLS, &[]).unwrap()[0].kind, magic::REP_ACK);
    let mut after = Conversation::connect(&secured.scratch.socket("server")).unwrap();
    after.hello(3).unwrap();
    assert_eq!(after.option(magic::OPT_STARTTLS, &[]).unwrap()[0].kind, magic::REP_ERR_UNSUP);
    assert_eq!(after.go("").unwrap().size, SIZE);
}

// nbd: tls.all-after
#[test]
fn all_data_goes_through_tls() {
    let secured = secured();
    let uri = secured.uri();
    let used = on_worker(move || async move {
        let device = open(&uri, options()).await?.device().clone();
        use_it(device).await
    });
    used.unwrap();
}
