-- Written by `python -m coterie.store.newest --write`: what the migrations to this revision leave behind.
-- Revision: cos_0008
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('cos_0008');
CREATE TABLE events (
	run_id VARCHAR NOT NULL, 
	number INTEGER NOT NULL, 
	message BLOB NOT NULL, 
	PRIMARY KEY (run_id, number)
);
CREATE TABLE expansion_uploads (
	run_id VARCHAR NOT NULL, 
	slot INTEGER NOT NULL, 
	epoch INTEGER NOT NULL, 
	upload_id BLOB NOT NULL, 
	PRIMARY KEY (run_id, slot, epoch)
);
CREATE TABLE holdings (
	run_id VARCHAR NOT NULL, 
	slot INTEGER NOT NULL, 
	items BLOB NOT NULL, 
	PRIMARY KEY (run_id, slot)
);
CREATE TABLE items (
	run_id VARCHAR NOT NULL, 
	item INTEGER NOT NULL, 
	"key" VARCHAR NOT NULL, 
	PRIMARY KEY (run_id, item)
);
CREATE TABLE latent_uploads (
	run_id VARCHAR NOT NULL, 
	slot INTEGER NOT NULL, 
	epoch INTEGER NOT NULL, 
	upload_id BLOB NOT NULL, 
	PRIMARY KEY (run_id, slot, epoch)
);
CREATE TABLE participants (
	run_id VARCHAR NOT NULL, 
	slot INTEGER NOT NULL, 
	participant BLOB NOT NULL, 
	party VARCHAR NOT NULL, 
	message BLOB NOT NULL, 
	PRIMARY KEY (run_id, slot), 
	UNIQUE (run_id, participant)
);
CREATE TABLE party_changes (
	run_id VARCHAR NOT NULL, 
	change VARCHAR NOT NULL, 
	count INTEGER NOT NULL, 
	until INTEGER NOT NULL, 
	PRIMARY KEY (run_id, change)
);
CREATE TABLE populations (
	run_id VARCHAR NOT NULL, 
	slots BLOB NOT NULL, 
	beacon BLOB NOT NULL, 
	signature BLOB NOT NULL, 
	PRIMARY KEY (run_id)
);
CREATE TABLE progress (
	run_id VARCHAR NOT NULL, 
	slot INTEGER NOT NULL, 
	sequence INTEGER NOT NULL, 
	epoch INTEGER NOT NULL, 
	blocks INTEGER NOT NULL, 
	digest BLOB NOT NULL, 
	PRIMARY KEY (run_id, slot)
);
CREATE TABLE relayed (
	run_id VARCHAR NOT NULL, 
	service VARCHAR NOT NULL, 
	party VARCHAR NOT NULL, 
	request VARCHAR NOT NULL, 
	refused VARCHAR NOT NULL, 
	count INTEGER NOT NULL, 
	PRIMARY KEY (run_id, service, party, request, refused)
);
CREATE TABLE runs (
	run_id VARCHAR NOT NULL, 
	request BLOB NOT NULL, 
	plan_hash BLOB NOT NULL, 
	state TEXT NOT NULL, 
	snapshot INTEGER DEFAULT '0' NOT NULL, 
	PRIMARY KEY (run_id)
);
CREATE TABLE submissions (
	run_id VARCHAR NOT NULL, 
	party VARCHAR NOT NULL, 
	kind INTEGER NOT NULL, 
	place VARCHAR NOT NULL, 
	sha256 BLOB NOT NULL, 
	payload BLOB NOT NULL, 
	PRIMARY KEY (run_id, party, kind, place)
);
CREATE TABLE sum_messages (
	run_id VARCHAR NOT NULL, 
	round INTEGER NOT NULL, 
	step VARCHAR NOT NULL, 
	member INTEGER NOT NULL, 
	message BLOB NOT NULL, 
	PRIMARY KEY (run_id, round, step, member)
);
CREATE TABLE sums (
	run_id VARCHAR NOT NULL, 
	round INTEGER NOT NULL, 
	"plan" BLOB NOT NULL, 
	step VARCHAR NOT NULL, 
	phase VARCHAR NOT NULL, 
	reason TEXT NOT NULL, 
	running BLOB, 
	PRIMARY KEY (run_id, round)
);
CREATE TABLE updates (
	run_id VARCHAR NOT NULL, 
	version INTEGER NOT NULL, 
	gradient BLOB NOT NULL, 
	PRIMARY KEY (run_id, version)
);
CREATE TABLE waves (
	run_id VARCHAR NOT NULL, 
	number INTEGER NOT NULL, 
	from_pass INTEGER NOT NULL, 
	slots BLOB NOT NULL, 
	beacon BLOB NOT NULL, 
	signature BLOB NOT NULL, 
	PRIMARY KEY (run_id, number)
);
