//! `lily pull` against a stand-in for the Hub that behaves well, then badly in every way a
//! server or a network does. Each test starts the real program with its own empty home folder;
//! nothing leaves this machine.

mod home;
mod hub;

use std::fs;
use std::path::Path;
use std::process::Child;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use home::{Home, Ran, walk};
use hub::{Answer, COMMIT, Repo, SHARD, SHARD_BYTES, Server, git, noise, serve, sha256};

// A good server.

#[test]
fn fills_the_hub_cache_as_other_tools_do() {
    let (home, hub) = (Home::new(), Server::hub(|_, _| None));
    let ran = home.pull(&hub);
    ran.succeeds();
    assert_eq!(ran.out.trim(), home.snapshot().display().to_string());
    home.assert_complete(&home.snapshot());
    assert_eq!(fs::read_to_string(home.repo().join("refs/main")).unwrap(), COMMIT);
    let repo = Repo::new();
    for (name, bytes) in &repo.files {
        let target = fs::read_link(home.snapshot().join(name)).unwrap();
        let blob = if name.ends_with(".safetensors") { sha256(bytes) } else { git(bytes) };
        assert_eq!(target, Path::new("../../blobs").join(blob));
    }
    // Nothing that Lily does not read was asked for.
    let log = hub.log.lock().unwrap();
    assert!(log.iter().all(|a| repo.files.iter().any(|(name, _)| *name == a.file)));
}

#[test]
fn a_second_pull_fetches_nothing() {
    let (home, hub) = (Home::new(), Server::hub(|_, _| None));
    home.pull(&hub).succeeds();
    let before = hub.log.lock().unwrap().iter().filter(|a| a.method == "GET").count();
    home.pull(&hub).succeeds().says("nothing to fetch");
    let after = hub.log.lock().unwrap().iter().filter(|a| a.method == "GET").count();
    assert_eq!(before, after);
}

#[test]
fn what_the_cache_lacks_or_has_wrong_is_fetched() {
    let (home, hub) = (Home::new(), Server::hub(|_, _| None));
    home.pull(&hub).succeeds();
    let repo = Repo::new();
    // A small file with other bytes of the same size, a shard that is too short, a dangling link.
    fs::write(home.snapshot().join("tokenizer.json"), noise(9, 70_000)).unwrap();
    fs::write(home.snapshot().join(SHARD), b"short").unwrap();
    fs::remove_file(home.repo().join("blobs").join(git(repo.bytes("config.json")))).unwrap();
    let before = hub.log.lock().unwrap().len();
    home.pull(&hub).succeeds().says("3 fetched");
    home.assert_complete(&home.snapshot());
    let log = hub.log.lock().unwrap();
    let fetched: Vec<_> = log[before..].iter().filter(|a| a.method == "GET").collect();
    assert!(
        fetched.iter().all(|a| ["tokenizer.json", SHARD, "config.json"].contains(&a.file.as_str()))
    );
}

#[test]
fn a_plain_folder_takes_from_the_cache_what_it_has() {
    let (home, hub) = (Home::new(), Server::hub(|_, _| None));
    home.pull(&hub).succeeds();
    let to = home.path("plain");
    let args = ["--revision", "main", "--to", to.to_str().unwrap()];
    // One cached file is damaged at the same size: it is noticed and fetched.
    let blob = home.repo().join("blobs").join(sha256(Repo::new().bytes(SHARD)));
    fs::write(&blob, noise(9, SHARD_BYTES)).unwrap();
    let before = hub.log.lock().unwrap().len();
    let ran = home.run(&hub, &args);
    assert_eq!(ran.succeeds().out.trim(), to.display().to_string());
    home.assert_complete(&to);
    let log = hub.log.lock().unwrap();
    let fetched: Vec<_> = log[before..].iter().filter(|a| a.method == "GET").collect();
    assert!(fetched.iter().all(|a| a.file == SHARD), "{fetched:?}");
    assert!(!fetched.is_empty());
}

#[test]
fn a_plain_folder_needs_no_home() {
    let (home, hub) = (Home::new(), Server::hub(|_, _| None));
    let to = home.path("deep/er");
    let args = ["--revision", "main", "--to", to.to_str().unwrap()];
    let ran = Ran::of(home.command(&hub, &args).env_remove("HF_HOME").output().unwrap());
    ran.succeeds();
    home.assert_complete(&to);
    assert!(to.join("config.json").is_file() && !to.join("config.json").is_symlink());
    let ran = Ran::of(
        home.command(&hub, &["--revision", "main"]).env_remove("HF_HOME").output().unwrap(),
    );
    ran.fails(&["HF_HOME", "--to"]);
}

#[test]
fn a_revision_may_lack_optional_files_and_the_index() {
    let mut repo = Repo::new();
    let shard = repo.bytes(SHARD).to_vec();
    repo.files.retain(|(name, _)| ["config.json", "tokenizer.json"].contains(&name.as_str()));
    repo.files.push(("model.safetensors".into(), shard));
    let hub = Server::start(move |asked| repo.answer(asked));
    let home = Home::new();
    home.pull(&hub).succeeds();
    assert_eq!(fs::read_dir(home.snapshot()).unwrap().count(), 3);
}

// A bad network.

#[test]
fn cut_connections_are_resumed() {
    let hub = Server::hub(|asked, repo| {
        let cut = asked.path.starts_with("/store/") && asked.file == SHARD && asked.nth < 8;
        (cut && asked.method == "GET").then(|| serve(repo.bytes(SHARD), asked).cut(400_000))
    });
    let home = Home::new();
    home.pull(&hub).succeeds();
    home.assert_complete(&home.snapshot());
    let froms: Vec<_> = hub.gets(SHARD).iter().map(|a| a.from()).collect();
    assert!(froms.len() > 2 && froms[0].is_none(), "{froms:?}");
    assert!(
        froms[1..].windows(2).all(|w| w[0] < w[1]),
        "each goes on where the last stopped: {froms:?}"
    );
}

#[test]
fn an_interrupted_run_is_taken_up() {
    let half = SHARD_BYTES / 2;
    let hub = Server::hub(move |asked, repo| {
        let hang =
            asked.path.starts_with("/store/") && asked.file == SHARD && asked.from().is_none();
        hang.then(|| serve(repo.bytes(SHARD), asked).stall(half, Duration::from_secs(60)))
    });
    let home = Home::new();
    let mut child = home.command(&hub, &["--revision", "main"]).spawn().unwrap();
    let part = home.repo().join("blobs").join(sha256(Repo::new().bytes(SHARD)) + ".incomplete");
    wait_for(|| fs::metadata(&part).is_ok_and(|m| m.len() == half as u64));
    child.kill().unwrap();
    child.wait().unwrap();
    home.pull(&hub).succeeds();
    home.assert_complete(&home.snapshot());
    assert_eq!(hub.gets(SHARD).last().unwrap().from(), Some(half));
}

#[track_caller]
fn wait_for(mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(30), "waited in vain");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_silent_connection_is_left_and_resumed() {
    let hub = Server::hub(|asked, repo| {
        let stall =
            asked.path.starts_with("/store/") && asked.file == SHARD && asked.from().is_none();
        stall.then(|| serve(repo.bytes(SHARD), asked).stall(1_000_000, Duration::from_secs(60)))
    });
    let (home, start) = (Home::new(), Instant::now());
    home.run(&hub, &["--revision", "main", "--timeout", "1"]).succeeds();
    assert!(start.elapsed() < Duration::from_secs(20));
    home.assert_complete(&home.snapshot());
    assert_eq!(hub.gets(SHARD).last().unwrap().from(), Some(1_000_000));
}

#[test]
fn a_server_that_never_answers_is_given_up() {
    let hub = Server::start(|_| {
        thread::sleep(Duration::from_secs(60));
        Answer::new(200)
    });
    let start = Instant::now();
    let ran = Home::new().run(&hub, &["--revision", "main", "--timeout", "1", "--retries", "1"]);
    ran.fails(&["gave up after 2 tries", "timeout", "run the same command again"]);
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn no_server_at_all() {
    let gone = Server { port: 1, log: Arc::default() };
    let ran = Home::new().run(&gone, &["--revision", "main", "--retries", "1"]);
    ran.fails(&["gave up after 2 tries", "onnection refused"]);
}

#[test]
fn a_server_that_ignores_ranges_is_read_from_the_start() {
    let hub = Server::hub(|asked, repo| {
        let get = asked.path.starts_with("/store/") && asked.file == SHARD;
        let whole = Answer::new(200).body(repo.bytes(SHARD));
        get.then(|| if asked.from().is_none() { whole.cut(500_000) } else { whole })
    });
    let home = Home::new();
    home.pull(&hub).succeeds().says("cannot resume");
    home.assert_complete(&home.snapshot());
}

#[test]
fn a_server_that_sends_another_range_is_not_believed() {
    let hub = Server::hub(|asked, repo| {
        if !asked.path.starts_with("/store/") || asked.file != SHARD {
            return None;
        }
        let bytes = repo.bytes(SHARD);
        match (asked.from(), asked.nth) {
            (None, 0..=1) => Some(Answer::new(200).body(bytes).cut(500_000)),
            (Some(_), _) => {
                let range = format!("bytes 0-{}/{}", bytes.len() - 1, bytes.len());
                Some(Answer::new(206).with("content-range", range).body(bytes))
            }
            _ => None,
        }
    });
    let home = Home::new();
    home.pull(&hub).succeeds().says("another range");
    home.assert_complete(&home.snapshot());
}

#[test]
fn a_leftover_longer_than_the_file_is_no_start() {
    let (home, hub) = (Home::new(), Server::hub(|_, _| None));
    let blobs = home.repo().join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    let part = blobs.join(sha256(Repo::new().bytes(SHARD)) + ".incomplete");
    fs::write(part, noise(3, SHARD_BYTES + 1)).unwrap();
    home.pull(&hub).succeeds();
    home.assert_complete(&home.snapshot());
    assert_eq!(hub.gets(SHARD)[0].from(), None);
}

#[test]
fn a_leftover_with_wrong_bytes_is_fetched_afresh() {
    let (home, hub) = (Home::new(), Server::hub(|_, _| None));
    let blobs = home.repo().join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    let part = blobs.join(sha256(Repo::new().bytes(SHARD)) + ".incomplete");
    fs::write(part, vec![0; 100_000]).unwrap();
    home.pull(&hub).succeeds().says("do not fit together");
    home.assert_complete(&home.snapshot());
    let froms: Vec<_> = hub.gets(SHARD).iter().map(|a| a.from()).collect();
    assert_eq!(froms, [Some(100_000), None]);
}

// Wrong bytes, wrong lengths.

#[test]
fn wrong_bytes_are_thrown_away() {
    let hub = Server::hub(|asked, _| {
        let get = asked.path.starts_with("/store/") && asked.file == SHARD;
        get.then(|| serve(&noise(4, SHARD_BYTES), asked))
    });
    let home = Home::new();
    home.pull(&hub).fails(&[SHARD, "checksum", "thrown away", "Pull again"]);
    assert!(!home.snapshot().join(SHARD).exists());
    let digest = sha256(Repo::new().bytes(SHARD));
    assert!(!walk(&home.repo()).iter().any(|p| p.to_string_lossy().contains(&digest)));
}

#[test]
fn wrong_bytes_in_a_small_file_too() {
    let hub = Server::hub(|asked, repo| {
        let get = asked.method == "GET" && asked.file == "tokenizer.json";
        get.then(|| serve(&noise(8, repo.bytes("tokenizer.json").len()), asked))
    });
    Home::new().pull(&hub).fails(&["tokenizer.json", "checksum"]);
}

#[test]
fn another_length_is_another_file() {
    for len in [SHARD_BYTES - 1, SHARD_BYTES + 1, 0] {
        let hub = Server::hub(move |asked, _| {
            let get = asked.path.starts_with("/store/") && asked.file == SHARD;
            get.then(|| serve(&noise(1, len), asked))
        });
        let offers = format!("offers {len} bytes, expected {SHARD_BYTES}");
        Home::new().pull(&hub).fails(&[SHARD, &offers, "HF_ENDPOINT"]);
    }
}

#[test]
fn an_answer_without_length_is_measured() {
    // Ends by closing: too short looks like a cut and is resumed, too long is refused.
    let unmeasured = |bytes: &[u8]| Answer { body: bytes.to_vec(), ..Answer::new(200) };
    let short = Server::hub(move |asked, repo| {
        let get =
            asked.path.starts_with("/store/") && asked.file == SHARD && asked.from().is_none();
        get.then(|| unmeasured(&repo.bytes(SHARD)[..1_000]))
    });
    let home = Home::new();
    home.pull(&short).succeeds().says("ended early");
    home.assert_complete(&home.snapshot());
    let long = Server::hub(move |asked, _| {
        let get = asked.path.starts_with("/store/") && asked.file == SHARD;
        get.then(|| unmeasured(&noise(1, SHARD_BYTES + 5)))
    });
    Home::new().pull(&long).fails(&[SHARD, "offers more than"]);
}

#[test]
fn the_tested_revision_is_checked_against_what_is_compiled_in() {
    let hub = Server::hub(|_, _| None);
    let ran = Home::new().run(&hub, &[]);
    // The disk may be too small for the real files; that is found out first.
    if ran.err.contains("not enough disk space") {
        eprintln!("skipped: this test needs 21 GB of free disk");
        return;
    }
    ran.fails(&["config.json", "expected 23591"]);
    assert!(hub.asked("HEAD", "config.json").is_empty(), "nothing is asked of what is known");
}

// Refusals.

/// A Hub that refuses everything with one status.
fn refusing(status: u16, code: Option<&'static str>) -> Server {
    Server::start(move |_| {
        let answer = Answer::new(status).body(b"no");
        match code {
            Some(code) => answer.with("x-error-code", code),
            None => answer,
        }
    })
}

#[test]
fn refusals_say_what_to_do() {
    let cases: [(u16, Option<&str>, &[&str]); 6] = [
        (401, None, &["(401)", "Set HF_TOKEN", "settings/tokens"]),
        (403, Some("GatedRepo"), &["(403, GatedRepo)", "terms", "HF_TOKEN"]),
        (403, None, &["(403)", "proxy"]),
        (404, Some("RevisionNotFound"), &["(404, RevisionNotFound)", "--revision"]),
        (404, None, &["(404)", "HF_ENDPOINT"]),
        (418, None, &["418", "HF_ENDPOINT"]),
    ];
    for (status, code, words) in cases {
        let hub = refusing(status, code);
        Home::new().pull(&hub).fails(words);
        assert_eq!(hub.log.lock().unwrap().len(), 1, "{status} is not asked for twice");
    }
}

#[test]
fn a_refused_token_is_not_printed() {
    let (home, hub) = (Home::new(), refusing(401, None));
    let mut command = home.command(&hub, &["--revision", "main"]);
    let ran = Ran::of(command.env("HF_TOKEN", "hf_secret").output().unwrap());
    ran.fails(&["(401)", "not accepted"]);
    assert!(!ran.err.contains("hf_secret"));
    assert_eq!(hub.log.lock().unwrap()[0].headers["authorization"], "Bearer hf_secret");
}

#[test]
fn the_token_file_is_read() {
    let (home, hub) = (Home::new(), refusing(401, None));
    fs::create_dir_all(home.path("hf")).unwrap();
    fs::write(home.path("hf/token"), "hf_from_file\n").unwrap();
    home.pull(&hub).fails(&["(401)", "not accepted"]);
    assert_eq!(hub.log.lock().unwrap()[0].headers["authorization"], "Bearer hf_from_file");
}

#[test]
fn busy_servers_are_waited_for() {
    let hub = Server::hub(|asked, _| match (asked.file.as_str(), asked.nth) {
        ("config.json", 0) => Some(Answer::new(429).with("retry-after", 1).body(b"")),
        ("config.json", 1) => Some(Answer::new(429).with("ratelimit", "\"x\";r=0;t=1").body(b"")),
        ("tokenizer.json", 0..=1) => Some(Answer::new(503).body(b"")),
        (SHARD, 0) if asked.path.starts_with("/store/") => Some(Answer::new(502).body(b"")),
        _ => None,
    });
    let (home, start) = (Home::new(), Instant::now());
    home.pull(&hub).succeeds().says("429").says("trying again in 1.0 s").says("503");
    assert!(start.elapsed() >= Duration::from_secs(2), "the server asked for 1 s twice");
    home.assert_complete(&home.snapshot());
}

#[test]
fn a_server_that_stays_busy_is_given_up() {
    let busy = Server::start(|_| Answer::new(429).with("retry-after", 86_400).body(b""));
    Home::new().pull(&busy).fails(&["429", "86400 s", "Pull again after that"]);
    let broken = refusing(500, None);
    let ran = Home::new().run(&broken, &["--revision", "main", "--retries", "2"]);
    ran.fails(&["gave up after 3 tries", "500"]);
}

// Redirects.

#[test]
fn the_token_stays_at_home() {
    // "localhost" and "127.0.0.1" are two hosts to a client.
    let repo = Repo::new();
    let store = Server::start(move |asked| serve(repo.bytes(&asked.file), asked));
    let port = store.port;
    let hub = Server::hub(move |asked, repo| {
        let moved = asked.file.ends_with(".safetensors") || asked.file == "tokenizer.json";
        moved.then(|| {
            let to = format!("http://localhost:{port}/x/{}", asked.file);
            let bytes = repo.bytes(&asked.file);
            let answer = Answer::new(307).with("location", to).with("x-repo-commit", COMMIT);
            answer.with("x-linked-etag", sha256(bytes)).with("x-linked-size", bytes.len()).body(b"")
        })
    });
    let home = Home::new();
    let mut command = home.command(&hub, &["--revision", "main"]);
    Ran::of(command.env("HF_TOKEN", "hf_secret").output().unwrap()).succeeds();
    home.assert_complete(&home.snapshot());
    let sent = |server: &Server| -> Vec<bool> {
        let log = server.log.lock().unwrap();
        log.iter().map(|a| a.headers.contains_key("authorization")).collect()
    };
    assert!(sent(&hub).iter().all(|token| *token));
    assert_eq!(sent(&store), [false; 3]);
}

#[test]
fn the_token_follows_a_redirect_within_the_server() {
    let home_only = Server::hub(|asked, _| {
        let token = asked.headers.get("authorization").is_some_and(|t| t == "Bearer hf_secret");
        (!token).then(|| Answer::new(401).body(b""))
    });
    let home = Home::new();
    let mut command = home.command(&home_only, &["--revision", "main"]);
    Ran::of(command.env("HF_TOKEN", "hf_secret").output().unwrap()).succeeds();
}

#[test]
fn an_expired_link_is_asked_for_anew() {
    let repo = Repo::new();
    let store = Server::start(move |asked| match asked.nth {
        0..=1 => Answer::new(403).body(b"expired"),
        _ => serve(repo.bytes(&asked.file), asked),
    });
    let port = store.port;
    let hub = Server::hub(move |asked, _| {
        let moved = asked.method == "GET" && asked.file == SHARD;
        moved.then(|| {
            let to = format!("http://localhost:{port}/{}?signature={}", asked.file, asked.nth);
            Answer::new(302).with("location", to).body(b"")
        })
    });
    let home = Home::new();
    home.pull(&hub).succeeds().says("403").says("trying again");
    home.assert_complete(&home.snapshot());
}

#[test]
fn redirects_that_lead_nowhere() {
    let cases: [(Option<&str>, &str); 4] = [
        (Some("/store/config.json"), "redirects"),
        (None, "redirect to nowhere"),
        (Some("ftp://host/file"), "ftp://host/file"),
        (Some("file:///etc/passwd"), "file:///etc/passwd"),
    ];
    for (location, word) in cases {
        let hub = Server::start(move |_| {
            let answer = Answer::new(302).body(b"");
            location.map_or(answer.clone(), |to| answer.with("location", to))
        });
        Home::new().pull(&hub).fails(&[word, "HF_ENDPOINT"]);
    }
}

// What the server says of files.

#[test]
fn a_server_that_names_no_checksum_or_commit_is_not_used() {
    for (name, value, word) in
        [("etag", "\"5f3-18c\"", "checksum"), ("x-repo-commit", "../../evil", "commit")]
    {
        let hub = Server::hub(move |asked, repo| {
            (asked.file == "config.json").then(|| repo.answer(asked).with(name, value))
        });
        Home::new().pull(&hub).fails(&["config.json", word, "mirror"]);
    }
}

#[test]
fn an_index_that_points_out_of_the_folder_is_refused() {
    let cases = [
        ("{\"weight_map\": {\"a\": \"../evil.safetensors\"}}", "../evil"),
        ("{\"weight_map\": {\"a\": \"/etc/evil.safetensors\"}}", "/etc/evil"),
        ("{\"weight_map\": {\"a\": 3}}", "expected a string"),
        ("{\"weight_map\": {}}", "weight_map is empty"),
        ("{", "not a safetensors index"),
        ("{\"weight_map\": {\"a\": \"x?y.safetensors\"}}", "x?y"),
    ];
    for (text, word) in cases {
        let mut repo = Repo::new();
        repo.files.iter_mut().find(|(name, _)| name.contains("index")).unwrap().1 = text.into();
        let hub = Server::start(move |asked| repo.answer(asked));
        Home::new().pull(&hub).fails(&["index", word]);
    }
}

#[test]
fn revisions_that_are_paths_are_refused() {
    let hub = Server::hub(|_, _| None);
    Home::new().run(&hub, &["--revision", "../../etc"]).fails(&["--revision", "../../etc"]);
    assert!(hub.log.lock().unwrap().is_empty());
}

#[test]
fn offline_means_offline() {
    let (home, hub) = (Home::new(), Server::hub(|_, _| None));
    for args in [&["--revision", "main"][..], &[]] {
        let ran = Ran::of(home.command(&hub, args).env("HF_HUB_OFFLINE", "1").output().unwrap());
        ran.fails(&["HF_HUB_OFFLINE"]);
    }
    assert!(hub.log.lock().unwrap().is_empty());
}

// The disk.

#[test]
fn too_little_room_is_known_before_the_first_byte() {
    let hub = Server::hub(|asked, repo| {
        let huge = asked.method == "HEAD" && asked.file == SHARD;
        huge.then(|| repo.answer(asked).with("x-linked-size", 1u64 << 60))
    });
    let home = Home::new();
    home.pull(&hub).fails(&["not enough disk space", "free", "--to"]);
    assert!(hub.gets(SHARD).is_empty() && hub.gets("config.json").is_empty());
}

#[test]
#[cfg(target_os = "linux")]
fn a_disk_that_fills_up() {
    let (home, hub) = (Home::new(), Server::hub(|_, _| None));
    let to = home.path("full");
    fs::create_dir_all(&to).unwrap();
    // Every write to /dev/full fails as on a full disk.
    std::os::unix::fs::symlink("/dev/full", to.join(format!("{SHARD}.incomplete"))).unwrap();
    let ran = home.run(&hub, &["--revision", "main", "--to", to.to_str().unwrap()]);
    ran.fails(&[SHARD, "disk is full", "run the same command again"]);
    assert!(to.join("config.json").exists(), "what had arrived is kept");
}

#[test]
fn a_place_that_cannot_be_written() {
    let (home, hub) = (Home::new(), Server::hub(|_, _| None));
    fs::write(home.path("file"), b"").unwrap();
    let to = home.path("file/below");
    let ran = home.run(&hub, &["--revision", "main", "--to", to.to_str().unwrap()]);
    ran.fails(&["cannot create", "file/below", "--to DIR"]);
}

#[test]
#[cfg(unix)]
fn a_place_that_may_not_be_written() {
    use std::os::unix::fs::PermissionsExt;
    let (home, hub) = (Home::new(), Server::hub(|_, _| None));
    let to = home.path("locked");
    fs::create_dir(&to).unwrap();
    fs::set_permissions(&to, fs::Permissions::from_mode(0o555)).unwrap();
    if fs::write(to.join("probe"), b"").is_ok() {
        eprintln!("skipped: needs a user whom permissions bind, and this one is root");
        return;
    }
    let ran = home.run(&hub, &["--revision", "main", "--to", to.to_str().unwrap()]);
    ran.fails(&["cannot write", "may write to", "--to DIR"]);
}

// Two at once.

#[test]
fn two_pulls_at_once_share_the_work() {
    for plain in [false, true] {
        let hub = Server::hub(|asked, repo| {
            let slow = asked.path.starts_with("/store/") && asked.file == SHARD;
            slow.then(|| serve(repo.bytes(SHARD), asked).stall(1_000, Duration::from_secs(1)))
        });
        let home = Home::new();
        let to = home.path("plain");
        let mut args = vec!["--revision", "main"];
        if plain {
            args.extend(["--to", to.to_str().unwrap()]);
        }
        let children: Vec<Child> =
            (0..2).map(|_| home.command(&hub, &args).spawn().unwrap()).collect();
        let ran: Vec<Ran> =
            children.into_iter().map(|c| Ran::of(c.wait_with_output().unwrap())).collect();
        for r in &ran {
            r.succeeds();
        }
        home.assert_complete(&if plain { to } else { home.snapshot() });
        assert_eq!(hub.gets(SHARD).len(), 1, "one waited for the other");
        assert!(ran.iter().any(|r| r.err.contains("waiting for another download")));
    }
}
