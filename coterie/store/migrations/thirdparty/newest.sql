-- Written by `python -m coterie.store.newest --write`: what the migrations to this revision leave behind.
-- Revision: thirdparty_0009
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('thirdparty_0009');
CREATE TABLE beacons (
	run_id VARCHAR NOT NULL, 
	population_sha256 BLOB NOT NULL, 
	beacon BLOB NOT NULL, 
	signature BLOB NOT NULL, members INTEGER DEFAULT '0' NOT NULL, 
	PRIMARY KEY (run_id)
);
CREATE TABLE bundles (
	participant BLOB NOT NULL, 
	party VARCHAR NOT NULL, 
	token_hash BLOB NOT NULL, 
	version INTEGER NOT NULL, 
	message BLOB NOT NULL, 
	PRIMARY KEY (participant)
);
CREATE TABLE directory (
	revision INTEGER NOT NULL, 
	PRIMARY KEY (revision)
);
INSERT INTO "directory" VALUES(1);
CREATE TABLE log_clock (
	time_ms BIGINT NOT NULL, 
	PRIMARY KEY (time_ms)
);
INSERT INTO "log_clock" VALUES(0);
CREATE TABLE log_entries (
	position INTEGER NOT NULL, 
	kind VARCHAR NOT NULL, 
	statement BLOB NOT NULL, 
	leaf BLOB NOT NULL, 
	PRIMARY KEY (position)
);
CREATE TABLE members (
	run_id VARCHAR NOT NULL, 
	participant BLOB NOT NULL, 
	PRIMARY KEY (run_id, participant)
)
 WITHOUT ROWID

;
CREATE TABLE paillier_countersignatures (
	run_id VARCHAR NOT NULL, 
	epoch INTEGER NOT NULL, 
	holder BLOB NOT NULL, 
	signing_public BLOB NOT NULL, 
	signature BLOB NOT NULL, 
	PRIMARY KEY (run_id, epoch, holder)
);
CREATE TABLE paillier_envelopes (
	run_id VARCHAR NOT NULL, 
	epoch INTEGER NOT NULL, 
	holder BLOB NOT NULL, 
	sealed BLOB NOT NULL, 
	PRIMARY KEY (run_id, epoch, holder)
);
CREATE TABLE paillier_keys (
	run_id VARCHAR NOT NULL, 
	epoch INTEGER NOT NULL, 
	generator BLOB NOT NULL, 
	needed INTEGER NOT NULL, 
	record BLOB NOT NULL, 
	PRIMARY KEY (run_id, epoch)
);
CREATE TABLE renewals (
	fingerprint BLOB NOT NULL, 
	"after" BLOB NOT NULL, 
	token_hash BLOB NOT NULL, 
	public_key_hash BLOB NOT NULL, 
	chain BLOB NOT NULL, 
	renewed INTEGER NOT NULL, 
	PRIMARY KEY (fingerprint), 
	UNIQUE ("after")
);
CREATE TABLE revocations (
	kind VARCHAR NOT NULL, 
	subject BLOB NOT NULL, 
	revision INTEGER NOT NULL, 
	PRIMARY KEY (kind, subject)
);
CREATE TABLE tokens (
	token_hash BLOB NOT NULL, 
	party VARCHAR NOT NULL, 
	participants INTEGER NOT NULL, 
	public_key_hash BLOB NOT NULL, 
	fingerprint BLOB NOT NULL, 
	chain BLOB NOT NULL, 
	redeemed INTEGER NOT NULL, 
	PRIMARY KEY (token_hash), 
	UNIQUE (fingerprint)
);
CREATE TABLE waves (
	run_id VARCHAR NOT NULL, 
	number INTEGER NOT NULL, 
	population_sha256 BLOB NOT NULL, 
	from_pass INTEGER NOT NULL, 
	beacon BLOB NOT NULL, 
	signature BLOB NOT NULL, participants BLOB DEFAULT '' NOT NULL, 
	PRIMARY KEY (run_id, number)
);
CREATE INDEX ix_bundles_token_hash ON bundles (token_hash);
CREATE INDEX ix_revocations_revision ON revocations (revision);
CREATE INDEX ix_renewals_token_hash ON renewals (token_hash);
CREATE INDEX ix_log_entries_leaf ON log_entries (leaf);
